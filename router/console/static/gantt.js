// A request's timeline as bars across processes, and which node made which of its tokens.

import { bytes, millis, ticks, tracks } from "./model.js";
import { Fragment, html, useEffect, useRef, useState } from "./parts.js";

const ROW = 26;
const BAR = 16;
const AXIS = 20;
const LABELS = 104; // pixels left of the bars
const LABELS_NARROW = 74;
const NARROW = 520;
const PART = 3; // height of a part, below the bar of its stage
const PART_COLORS = { queue: "gate", compute: "prefill", fetch: "transfer", "first step": "decode", subscribe: "transfer" };
const NODE_COLORS = 8; // .node-0 to .node-7

/** The colour class of a stage, or of what a node told of one. */
export function colorOf(span) {
  if (span.isLayers) return "stage-transfer";
  return `stage-${span.isPart ? PART_COLORS[span.stage] ?? "gate" : span.stage}`;
}

/** The colour class of each node, by its first appearance. */
export function nodeColors(made) {
  const names = [...new Set(made.map((each) => each.node))];
  return new Map(names.map((name, index) => [name, `node-${index % NODE_COLORS}`]));
}

function useWidth() {
  const place = useRef(null);
  const [width, setWidth] = useState(900);
  useEffect(() => {
    const element = place.current;
    const measured = () => setWidth(Math.max(240, element.clientWidth));
    measured();
    const resized = new ResizeObserver(measured);
    resized.observe(element);
    return () => resized.disconnect();
  }, []);
  return [place, width];
}

export function Gantt({ timeline, end }) {
  const [place, width] = useWidth();
  const rows = tracks(timeline);
  const labels = width < NARROW ? LABELS_NARROW : LABELS;
  const scale = (width - labels - 8) / Math.max(end, 1e-6);
  const x = (ms) => labels + ms * scale;
  const tall = AXIS + rows.length * ROW + 2;
  const said = `Timeline of ${millis(timeline.total_ms)}: ${timeline.stages.map((span) => `${span.stage}${span.node ? ` on ${span.node}` : ""} ${millis(span.end_ms - span.start_ms)}`).join(", ")}. The table below holds all figures.`;
  return html`
    <div class="gantt" ref=${place}>
      <svg width=${width} height=${tall} role="img" aria-label=${said}>
        ${ticks(end, width < NARROW ? 3 : 8).map((at) => html`
          <${Fragment} key=${at}>
            <line class="grid-line" x1=${x(at)} x2=${x(at)} y1=${AXIS - 4} y2=${tall} />
            <text class="axis" x=${x(at)} y="11" text-anchor=${at === 0 ? "start" : x(at) > width - 24 ? "end" : "middle"}>${at === 0 ? "0" : millis(at).replace(/\.0+ /, " ")}</text>
          <//>`)}
        ${rows.map((track, row) => html`
          <${Fragment} key=${track.name}>
            <text class="track" x="0" y=${AXIS + row * ROW + ROW / 2 + 4}>${track.name.length * 7 > labels ? `${track.name.slice(0, Math.floor(labels / 7) - 1)}…` : track.name}</text>
            ${track.spans.map((span, index) => html`<${Span} key=${index} span=${span} x=${x} y=${AXIS + row * ROW + (ROW - BAR) / 2} />`)}
            ${track.parts.map((part, index) => html`<${Part} key=${index} part=${part} x=${x} y=${AXIS + row * ROW + (ROW + BAR) / 2 + 1} />`)}
          <//>`)}
        ${timeline.ttft_ms !== null && html`<line class="first-token" x1=${x(timeline.ttft_ms)} x2=${x(timeline.ttft_ms)} y1=${AXIS - 4} y2=${tall}><title>first token ${millis(timeline.ttft_ms)}</title></line>`}
      </svg>
    </div>`;
}

function Span({ span, x, y }) {
  const wide = Math.max(1.5, x(span.end_ms) - x(span.start_ms));
  const took = millis(span.end_ms - span.start_ms);
  const text = `${span.stage} ${took}`;
  return html`
    <g class=${`stage-${span.stage}${span.why ? " failed" : ""}`}>
      <title>${`${span.stage}${span.node ? ` on ${span.node}` : ""}: ${took}, epoch ${span.epoch}${span.why ? `: ${span.why}` : ""}`}</title>
      <rect x=${x(span.start_ms)} y=${y} width=${wide} height=${BAR} rx="2" />
      ${wide > text.length * 6.6 + 10 && html`<text x=${x(span.start_ms) + 6} y=${y + 12}>${text}</text>`}
    </g>`;
}

function Part({ part, x, y }) {
  const wide = Math.max(1, x(part.end_ms) - x(part.start_ms));
  return html`
    <g class=${colorOf({ stage: part.name, isPart: true })}>
      <title>${`${part.name}${part.node ? ` on ${part.node}` : ""}: ${millis(part.end_ms - part.start_ms)}`}</title>
      <rect x=${x(part.start_ms)} y=${y} width=${wide} height=${PART} />
      ${(part.layers ?? []).map((each, index) => html`
        <rect key=${index} class="layers" x=${x(each.start_ms)} y=${y} width=${Math.max(1, x(each.end_ms) - x(each.start_ms))} height=${PART}>
          <title>${`${each.name}: ${bytes(each.kv_bytes)} in ${millis(each.end_ms - each.start_ms)}`}</title>
        </rect>`)}
    </g>`;
}

/** A strip of the output: which tokens came from which node. */
export function Makers({ made, total }) {
  if (!made.length || !total) return null;
  const colors = nodeColors(made);
  return html`
    <h3>Who made which tokens</h3>
    <div class="strip" role="img" aria-label=${made.map((each) => `${each.node} made tokens ${each.first + 1} to ${each.last}`).join(", ")}>
      ${made.map((each, index) => html`<span key=${index} class=${colors.get(each.node)} style=${{ flexGrow: each.last - each.first }} title=${`${each.node}: tokens ${each.first + 1} to ${each.last}`} />`)}
    </div>
    <${MakerLegend} made=${made} />`;
}

export function MakerLegend({ made }) {
  const colors = nodeColors(made);
  const sums = new Map();
  for (const each of made) sums.set(each.node, (sums.get(each.node) ?? 0) + each.last - each.first);
  return html`<p class="legend">${[...sums].map(([node, number]) => html`<span key=${node}><i class=${`key ${colors.get(node)}`} />${node} <b class="num">${number}</b></span>`)}</p>`;
}
