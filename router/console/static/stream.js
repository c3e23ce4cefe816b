// One streamed reply: asked through the router's public API, told token by token, with the nodes
// that made its tokens once it has ended.

import { askJson, postJson, readEvents } from "./feed.js";
import { makerOf, makers, millis, pieces, streamTimes, sureness } from "./model.js";
import { html, RequestLink, useEffect, useRef, useState } from "./parts.js";
import { MakerLegend, nodeColors } from "./gantt.js";

const API_KEY = "baton-console-api-key";
const TIMELINE_TRIES = 8;
const TIMELINE_PAUSE_MS = 250;

export const keptApiKey = () => sessionStorage.getItem(API_KEY) ?? "";
export const keepApiKey = (key) => sessionStorage.setItem(API_KEY, key);

const EMPTY = { number: 0, status: "idle", tokens: [], stamps: [], began: 0, id: null, made: [], error: null, finish: null };

/** [run, start(path, body), stop]: a stream and its state; drawn at most once per frame. */
export function useStream(consoleKey) {
  const run = useRef(EMPTY);
  const abort = useRef(null);
  const [, redraw] = useState(0);
  const frame = useRef(0);
  const draw = () => {
    frame.current ||= requestAnimationFrame(() => {
      frame.current = 0;
      redraw((number) => number + 1);
    });
  };
  useEffect(() => () => {
    abort.current?.abort();
    cancelAnimationFrame(frame.current);
  }, []);
  const start = async (path, body) => {
    abort.current?.abort();
    const mine = { ...EMPTY, number: run.current.number + 1, status: "running", tokens: [], stamps: [], began: performance.now() };
    run.current = mine;
    abort.current = new AbortController();
    draw();
    try {
      const reply = await postJson(`api/v1/${path}`, keptApiKey(), { ...body, stream: true }, abort.current.signal);
      await readEvents(reply, ({ data }) => {
        take(mine, data);
        draw();
      });
      mine.status = mine.error ? "failed" : "ended";
    } catch (error) {
      mine.status = error.name === "AbortError" ? "stopped" : "failed";
      if (mine.status === "failed") mine.error = error.message;
    }
    draw();
    if (mine.id && run.current === mine) {
      mine.made = await madeBy(mine.id, consoleKey);
      draw();
    }
    return mine;
  };
  return [run.current, start, () => abort.current?.abort()];
}

function take(run, data) {
  if (data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) run.error = chunk.error.message ?? String(chunk.error);
  run.id ??= chunk.id ?? null;
  const found = pieces(chunk);
  if (found.length) run.stamps.push(performance.now());
  run.tokens.push(...found);
  run.finish = chunk.choices?.[0]?.finish_reason ?? run.finish;
}

/** Who made its tokens; the router has the timeline soon after the end. */
async function madeBy(id, consoleKey) {
  for (let attempt = 0; attempt < TIMELINE_TRIES; attempt++) {
    try {
      return makers(await askJson(`../v1/requests/${encodeURIComponent(id)}/timeline`, consoleKey));
    } catch {
      await new Promise((resume) => setTimeout(resume, TIMELINE_PAUSE_MS));
    }
  }
  return [];
}

export const numTokens = (run) => run.tokens.reduce((sum, piece) => sum + piece.num, 0);

/** The text, each token with the colour of its node or of its log-probability. */
export function StreamText({ run, colors }) {
  const nodes = nodeColors(run.made);
  let index = 0;
  return html`
    <div class="stream" role="log" aria-live="off" aria-label="Reply" tabindex="0" data-run=${run.number} data-status=${run.status}>
      ${run.tokens.map((piece, number) => {
        const node = makerOf(run.made, index);
        index += piece.num;
        const sure = sureness(piece.logprob);
        const color = colors === "node" ? nodes.get(node) ?? "" : colors === "logprob" && sure !== null ? `sure-${sure}` : "";
        const said = `${node ?? ""}${piece.logprob === null ? "" : ` p ${Math.exp(piece.logprob).toFixed(3)}`}`.trim();
        return html`<span key=${number} class=${`${color} ${piece.part}`} title=${said || null}>${piece.text}</span>`;
      })}${run.status === "running" && html`<span class="caret" aria-hidden="true" />`}
    </div>
    ${colors === "node" && run.made.length > 0 && html`<${MakerLegend} made=${run.made} />`}
    ${colors === "node" && run.status === "running" && html`<p class="legend hint">The nodes are known when the stream has ended.</p>`}
    ${colors === "logprob" && html`<p class="legend">${["≥ 0.9", "≥ 0.6", "≥ 0.3", "≥ 0.1", "below"].map((text, step) => html`<span key=${text}><i class=${`key sure-${step}`} />p ${text}</span>`)}</p>`}`;
}

export function StreamFigures({ run }) {
  const total = numTokens(run);
  const { ttft, tpot, gap } = streamTimes(run.began, run.stamps, total);
  const rows = [["TTFT", millis(ttft)], ["TPOT", millis(tpot)], ["longest gap", millis(gap)], ["tokens", total],
    ["tokens/s", tpot ? (1000 / tpot).toFixed(1) : "–"], ["end", run.error ? "error" : run.finish ?? run.status]];
  return html`
    <dl class="figures small">${rows.map(([name, value]) => html`<div class="figure" key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
      ${run.id && run.status !== "running" && html`<div class="figure"><dt>timeline</dt><dd><${RequestLink} id=${run.id} /></dd></div>`}
    </dl>
    ${run.error && html`<p role="alert" class="bad">${run.error}</p>`}`;
}
