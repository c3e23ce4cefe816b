// Small parts that several views share: html templates, charts, bars, links to nodes and requests.

import { Fragment, h, render } from "./preact.js";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./preact-hooks.js";
import htm from "./htm.js";
import uPlot from "./uplot.js";
import { isWell, millis, percent, shortId } from "./model.js";

export { Fragment, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };
export const html = htm.bind(h);

const CHART_HEIGHT = 84;

/** Calls `action` at once and then again `every_ms` after each end, until the view closes. */
export function useRepeated(action, every_ms, inputs) {
  useEffect(() => {
    let timer = null;
    let open = true;
    const turn = async () => {
      await action(() => open);
      if (open) timer = setTimeout(turn, every_ms);
    };
    turn();
    return () => {
      open = false;
      clearTimeout(timer);
    };
  }, inputs);
}

export const NodeLink = ({ id }) =>
  id ? html`<a class="id" href=${`#/node/${encodeURIComponent(id)}`}>${id}</a>` : html`<span class="none">–</span>`;

export const RequestLink = ({ id, whole }) => html`
  <a class="id" title=${id} href=${`#/requests/${encodeURIComponent(id)}`}>${whole ? id : shortId(id)}</a>`;

/** A share as a bar; `label` says of what, for those who do not see it. */
export const Bar = ({ share, label, warn = 0.85 }) => html`
  <span class=${`bar${share >= warn ? " full" : ""}`} role="img" aria-label=${`${label}: ${percent(share)}`}>
    <span style=${{ width: `${Math.min(100, Math.max(0, share * 100))}%` }} />
  </span>`;

export const State = ({ node }) => html`
  <span class=${`state ${isWell(node) ? "well" : node.state === "draining" ? "warn" : "bad"}`} title=${node.text ?? ""}>${node.state}</span>`;

export const Figure = ({ name, children, note }) => html`
  <div class="figure"><dt>${name}</dt><dd>${children}${note && html`<small>${note}</small>`}</dd></div>`;

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

export const Panel = ({ title, aside, children, className = "" }) => html`
  <section class=${`panel ${className}`} aria-label=${title}>
    <header><h2>${title}</h2>${aside && html`<div class="aside">${aside}</div>`}</header>
    ${children}
  </section>`;

/** The colour of a custom property as the browser resolves it here, light or dark. */
function colorOf(element, name) {
  element.style.color = `var(${name})`;
  const found = getComputedStyle(element).color;
  element.style.color = "";
  return found;
}

/** A small line chart over time. `lines`: [{label, values, color}]; `format` of its figures. */
export function Chart({ title, at, lines, format = millis, theme }) {
  const place = useRef(null);
  const plot = useRef(null);
  const data = useMemo(() => [at, ...lines.map((line) => line.values.map((value) => value ?? null))], [at, lines]);
  useEffect(() => {
    const element = place.current;
    const ink = colorOf(element, "--faint-ink");
    const grid = colorOf(element, "--line");
    plot.current = new uPlot({
      width: Math.max(60, element.clientWidth), height: CHART_HEIGHT, legend: { show: false },
      cursor: { y: false, points: { size: 5 } }, padding: [6, 14, 0, 0],
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { stroke: ink, size: 18, font: "10px system-ui", grid: { show: false }, ticks: { show: false }, space: 64 },
        { stroke: ink, size: 46, font: "10px system-ui", grid: { stroke: grid, width: 1 }, ticks: { show: false },
          space: 26, values: (_, found) => found.map((value) => format(value)) },
      ],
      series: [{}, ...lines.map((line) => ({
        stroke: colorOf(element, line.color), width: 1.5, points: { show: false }, spanGaps: true,
        dash: line.dash,
      }))],
    }, data, element);
    const resized = new ResizeObserver(() => {
      plot.current?.setSize({ width: Math.max(60, element.clientWidth), height: CHART_HEIGHT });
    });
    resized.observe(element);
    return () => {
      resized.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [theme]);
  useEffect(() => plot.current?.setData(data), [data]);
  const now = lines.map((line) => [line, line.values[line.values.length - 1]]);
  const said = `${title}: ${now.map(([line, value]) => `${line.label} ${format(value)}`).join(", ")}`;
  return html`
    <figure class="chart">
      <figcaption>
        <b>${title}</b>
        ${now.map(([line, value]) => html`
          <span key=${line.label}><i class="key" style=${{ background: `var(${line.color})` }} />${line.label} <b class="num">${format(value)}</b></span>`)}
      </figcaption>
      <div ref=${place} role="img" aria-label=${said} />
    </figure>`;
}

/** Saves a JSON value as a file. */
export function download(name, value) {
  const address = URL.createObjectURL(new Blob([JSON.stringify(value)], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
