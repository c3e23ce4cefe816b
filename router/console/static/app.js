// The console's frame: the key, the seven views and their addresses, the keyboard, light and dark.

import { Feed, keepKey, takeKey } from "./feed.js";
import { count } from "./model.js";
import { html, render, useEffect, useRef, useState } from "./parts.js";
import { BreakIt } from "./view-break.js";
import { Cluster } from "./view-cluster.js";
import { Events } from "./view-events.js";
import { NodeView } from "./view-node.js";
import { Playground } from "./view-playground.js";
import { Requests } from "./view-requests.js";
import { Transfer } from "./view-transfer.js";

const VIEWS = [
  ["cluster", "Cluster", Cluster],
  ["requests", "Requests", Requests],
  ["node", "Node", NodeView],
  ["transfer", "Transfer", Transfer],
  ["events", "Events", Events],
  ["playground", "Playground", Playground],
  ["break", "Break it", BreakIt],
];
const THEMES = { auto: "light", light: "dark", dark: "auto" };
const THEME = "baton-console-theme";

const route = () => {
  const [, view, ...rest] = location.hash.split("/");
  const known = VIEWS.some(([name]) => name === view);
  return { view: known ? view : "cluster", rest: known ? rest.map(decodeURIComponent) : [] };
};

const isTyping = (target) => /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || target.isContentEditable;

function App() {
  const [key, setKey] = useState(takeKey);
  const [refused, setRefused] = useState("");
  if (!key) {
    return html`<${KeyForm} refused=${refused} done=${(given) => { keepKey(given); setKey(given); }} />`;
  }
  const ended = (text) => { keepKey(""); setRefused(text); setKey(""); };
  return html`<${Console} console_key=${key} ended=${ended} key=${key} />`;
}

function KeyForm({ refused, done }) {
  const send = (event) => {
    event.preventDefault();
    const given = new FormData(event.target).get("key").trim();
    if (given) done(given);
  };
  return html`
    <main class="gate">
      <h1>Baton console</h1>
      <form onSubmit=${send}>
        <label for="key">Key of an operator (<code>--admin-key</code>)</label>
        <input id="key" name="key" type="password" autocomplete="off" required autofocus />
        <button class="primary">Open</button>
      </form>
      ${refused && html`<p role="alert" class="bad">${refused}</p>`}
      <p class="hint">It stays in this tab. <code>baton console</code> opens this page with the key of <code>baton up</code>.</p>
    </main>`;
}

function useTheme() {
  const [theme, setTheme] = useState(() => localStorage.getItem(THEME) ?? "auto");
  const [dark, setDark] = useState(() => matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
  }, [theme]);
  useEffect(() => {
    const asked = matchMedia("(prefers-color-scheme: dark)");
    const told = () => setDark(asked.matches);
    asked.addEventListener("change", told);
    return () => asked.removeEventListener("change", told);
  }, []);
  return [theme, () => setTheme(THEMES[theme]), theme === "auto" ? (dark ? "dark" : "light") : theme];
}

function Console({ console_key: key, ended }) {
  const feed = useRef(null);
  const [, redraw] = useState(0);
  const [at, setAt] = useState(route);
  const [help, setHelp] = useState(false);
  const [theme, turnTheme, shownTheme] = useTheme();
  useEffect(() => {
    feed.current = new Feed(key, ended);
    const unwatch = feed.current.watch(() => redraw((number) => number + 1));
    const moved = () => {
      if (takeKey() === key) setAt(route());
      else location.reload(); // another key was pasted into the address
    };
    addEventListener("hashchange", moved);
    return () => {
      removeEventListener("hashchange", moved);
      unwatch();
      feed.current.stop();
    };
  }, []);
  const state = feed.current?.state;
  const views = VIEWS.filter(([name]) => name !== "break" || state?.router.demo);
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") setHelp(false);
      if (isTyping(event.target)) return;
      const view = views[Number(event.key) - 1];
      if (view) location.hash = `#/${view[0]}`;
      else if (event.key === "?") setHelp((shown) => !shown);
      else if (event.key === "t") turnTheme();
      else if (event.key === "/") {
        const search = document.querySelector("input[type=search]");
        if (search) search.focus();
        else location.hash = "#/requests";
      } else return;
      event.preventDefault();
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  const [, title, View] = views.find(([name]) => name === at.view) ?? views[0];
  useEffect(() => { document.title = `${title} · Baton console`; }, [title]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>To the view</a>
    <${Top} feed=${feed.current} views=${views} at=${at.view} theme=${theme} turnTheme=${turnTheme} turnHelp=${() => setHelp(!help)} />
    <main id="main" tabindex="-1" data-view=${at.view} data-ready=${state ? "true" : "false"}>
      <h1 class="unseen">${title}</h1>
      ${state
        ? html`<${View} state=${state} history=${feed.current.history} consoleKey=${key} rest=${at.rest} theme=${shownTheme} />`
        : html`<p class="empty">Waiting for the router …</p>`}
    </main>
    ${help && html`<${Help} views=${views} close=${() => setHelp(false)} />`}`;
}

const isWorker = (id) => /-w\d+$/.test(id); // of `--workers`: router/workers.py

function Top({ feed, views, at, theme, turnTheme, turnHelp }) {
  const state = feed?.state;
  const link = feed?.link ?? "connecting";
  return html`
    <header class="top">
      <span class="brand">Baton</span>
      <nav aria-label="Views">
        ${views.map(([name, title], index) => html`
          <a key=${name} href=${`#/${name}`} aria-current=${name === at ? "page" : null}><kbd aria-hidden="true">${index + 1}</kbd>${title}</a>`)}
      </nav>
      <span class="about">
        ${state && html`<span class="wide">${state.router.models.join(", ")} · ${state.router.version}</span>
          <span class="num wide">${count(state.totals.running)} running</span>`}
        ${state && isWorker(state.router.id) && html`<span class="state warn" title=${`${state.router.id}: one of several workers. Requests, events and rates are its own; each worker has a console.`}>worker ${state.router.id.split("-w").pop()}</span>`}
        ${state?.router.draining && html`<span class="state warn">draining</span>`}
        <span class=${`link ${link}`} role="status">${link === "live" ? "live" : link === "lost" ? "no router, trying again" : "connecting"}</span>
      </span>
      <span class="tools">
        <button class="plain" onClick=${turnTheme} title="light, dark or as the system (t)" aria-label=${`Colours: ${theme}`}>${theme}</button>
        <button class="plain" onClick=${turnHelp} aria-label="Keyboard help" title="keyboard (?)">?</button>
      </span>
    </header>`;
}

function Help({ views, close }) {
  const dialog = useRef(null);
  useEffect(() => { dialog.current.showModal(); }, []);
  const rows = [
    ...views.map(([, title], index) => [String(index + 1), title]),
    ["/", "search in this view"], ["t", "light, dark, as the system"], ["Tab, Enter", "move and open"], ["? Esc", "this help"],
  ];
  return html`
    <dialog ref=${dialog} class="help" aria-label="Keyboard" onClose=${close}>
      <h2>Keyboard</h2>
      <dl>${rows.map(([name, text]) => html`<div key=${name}><dt><kbd>${name}</kbd></dt><dd>${text}</dd></div>`)}</dl>
      <button onClick=${() => dialog.current.close()}>Close</button>
    </dialog>`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
