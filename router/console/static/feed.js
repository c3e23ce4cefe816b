// What the console asks the router for: the key, the stream of snapshots and deltas, single questions.

import { merged, sseReader } from "./model.js";

const BASE = new URL(".", import.meta.url); // .../console/
const KEY = "baton-console-key";
const HISTORY_S = 300;
const RETRY_MS = 1500;

/** The operator's key: from the address (whose fragment it leaves at once), else of this tab. */
export function takeKey() {
  const found = /^#key=([^&]*)/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, decodeURIComponent(found[1]));
    history.replaceState(null, "", `${location.pathname}${location.search}#/cluster`);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** The reply of a route below /console/ ("data/...") or beside it ("../v1/requests"). */
export async function ask(path, key, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if (key) headers.authorization = `Bearer ${key}`;
  const reply = await fetch(new URL(path, BASE), { ...options, headers, cache: "no-store" });
  if (!reply.ok) throw new Refused(reply.status, await reason(reply));
  return reply;
}

export const askJson = async (path, key, options) => (await ask(path, key, options)).json();

export const postJson = (path, key, body, signal) => ask(path, key, {
  method: "POST", signal, body: JSON.stringify(body), headers: { "content-type": "application/json" },
});

async function reason(reply) {
  const text = await reply.text();
  try {
    const told = JSON.parse(text);
    return told.error?.message ?? told.detail ?? text;
  } catch {
    return text.slice(0, 300) || `the router answered ${reply.status}`;
  }
}

/** Calls `each({event, data})` for every event of a reply's body, until it ends. */
export async function readEvents(reply, each) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const read = sseReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    for (const event of read(value)) each(event);
  }
}

/** The state of the cluster, live: `state` (null at first), `link`, `history`; tells `watch`ers. */
export class Feed {
  constructor(key, ended) {
    this.key = key;
    this.state = null;
    this.link = "connecting";
    this.history = [];
    this.watchers = new Set();
    this.ended = ended;
    this.abort = new AbortController();
    this.run();
  }

  watch(told) {
    this.watchers.add(told);
    return () => this.watchers.delete(told);
  }

  stop() {
    this.abort.abort();
  }

  async run() {
    const { signal } = this.abort;
    while (!signal.aborted) {
      try {
        const reply = await ask("data/stream", this.key, { signal });
        await readEvents(reply, (event) => this.take(event));
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
          this.ended(error.message);
          return;
        }
      }
      this.tell("lost");
      await new Promise((resume) => setTimeout(resume, RETRY_MS));
    }
  }

  take({ event, data }) {
    if (event === "snapshot") this.state = JSON.parse(data);
    else if (event === "delta" && this.state) this.state = merged(this.state, JSON.parse(data));
    else return;
    const oldest = this.state.at - HISTORY_S;
    this.history = [...this.history.filter(({ at }) => at > oldest && at < this.state.at),
      { at: this.state.at, totals: this.state.totals }];
    this.tell("live");
  }

  tell(link) {
    this.link = link;
    for (const told of this.watchers) told();
  }
}
