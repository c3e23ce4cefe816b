// View 3: one node. Its blocks, its prefixes, its last steps, its roofline, its tiers; asked anew
// every two seconds.

import { askJson } from "./feed.js";
import { blockCounts, blockPaint, byRole, bytes, clock, count, kvShare, millis, percent, prefixRows, shortId } from "./model.js";
import { Bar, Empty, Figure, Fragment, html, Panel, State, useEffect, useMemo, useRef, useRepeated, useState } from "./parts.js";

const EVERY_MS = 2000;
const COLOURS = [["state", "State"], ["request", "Request"], ["age", "Age"]];
const STEP_TALL = 90;
const ROOF = { wide: 420, tall: 210, left: 44, bottom: 26 };

export function NodeView({ state, consoleKey, rest, theme }) {
  const nodes = [...byRole(state.nodes, "prefill"), ...byRole(state.nodes, "decode")];
  const id = rest[0] ?? nodes[0]?.id;
  const node = nodes.find((each) => each.id === id);
  const [told, setTold] = useState({});
  useRepeated(async (isOpen) => {
    if (!id) return;
    try {
      const detail = await askJson(`data/nodes/${encodeURIComponent(id)}`, consoleKey);
      if (isOpen()) setTold({ id, detail });
    } catch (error) {
      if (isOpen()) setTold((had) => ({ id, detail: had.id === id ? had.detail : null, error: error.message }));
    }
  }, EVERY_MS, [id]);
  if (!id) return html`<${Empty}>No node is connected.<//>`;
  const detail = told.id === id ? told.detail : null;
  const aside = html`
    <label>Node <select value=${id} onChange=${(event) => { location.hash = `#/node/${encodeURIComponent(event.target.value)}`; }}>
      ${!node && html`<option value=${id}>${id}</option>`}
      ${nodes.map((each) => html`<option key=${each.id} value=${each.id} selected=${each.id === id}>${each.id} (${each.role})</option>`)}
    </select></label>`;
  return html`
    <${Panel} title=${`Node ${id}`} aside=${aside}>
      ${node ? html`<${Facts} node=${node} />` : html`<${Empty}>The router does not know this node now.<//>`}
      ${told.error && told.id === id && html`<p role="alert" class="bad">${told.error}</p>`}
    <//>
    ${detail && html`
      <${Blocks} blocks=${detail.blocks} theme=${theme} />
      <div class="two">
        <${Steps} steps=${detail.steps ?? []} />
        <${Roofline} roofline=${detail.roofline} />
        <${Prefixes} prefixes=${detail.prefixes ?? []} />
        <${Tiers} tiers=${detail.tiers ?? []} />
      </div>`}
    ${!detail && !told.error && html`<${Empty}>Asking the node …<//>`}`;
}

const Facts = ({ node }) => html`
  <dl class="figures">
    <${Figure} name="State"><${State} node=${node} /><//>
    <${Figure} name="Role">${node.role}<//>
    <${Figure} name="Running">${node.running}<//>
    <${Figure} name="Waiting">${node.waiting}<//>
    <${Figure} name="KV in use" note=${` of ${count(node.kv_total)}`}>${percent(kvShare(node))}<//>
    <${Figure} name="Tokens/s">${count(node.tokens_per_s)}<//>
    <${Figure} name="MBU">${percent(node.mbu)}<//>
    <${Figure} name="MFU">${percent(node.mfu)}<//>
    <${Figure} name="Precision">${node.precision}<//>
    <${Figure} name="Ranks">${node.ranks}<//>
    <${Figure} name="Address"><span class="id">${node.address}</span><//>
  </dl>
  ${node.text && html`<p class="warn">${node.text}</p>`}`;

// ---- the block map ------------------------------------------------------------------------------

function Blocks({ blocks, theme }) {
  const canvas = useRef(null);
  const [hint, setHint] = useState("");
  const [by, setBy] = useState("state");
  const counts = blockCounts(blocks.states);
  const paint = useMemo(() => blockPaint(blocks, by), [blocks, by]);
  const layout = useRef({ cells: 1, side: 8 });
  useEffect(() => {
    const draw = () => { if (canvas.current) layout.current = drawBlocks(canvas.current, paint.names); };
    draw();
    const resized = new ResizeObserver(draw);
    resized.observe(canvas.current.parentElement);
    return () => resized.disconnect();
  }, [paint, theme]);
  const point = (event) => {
    const { cells, side } = layout.current;
    const index = Math.floor(event.offsetY / side) * cells + Math.floor(event.offsetX / side);
    setHint(blockAt(blocks, index));
  };
  const said = `Block map of ${blocks.total} blocks: ${Object.entries(counts).map(([name, number]) => `${number} ${name}`).join(", ")}`;
  const beside = [["adopted from another pool", blocks.adopted], ["freed by a window", blocks.holes]].filter(([, number]) => number);
  const aside = html`<span class="num">${count(blocks.total)} blocks of ${blocks.size} tokens${beside.map(([name, number]) => ` · ${count(number)} ${name}`)}</span>
    <span class="tabs" role="group" aria-label="Colours of blocks">${COLOURS.map(([name, title]) => html`<button key=${name} aria-pressed=${by === name} onClick=${() => setBy(name)}>${title}</button>`)}</span>`;
  return html`
    <${Panel} title="Blocks" aside=${aside}>
      <p class="legend">${paint.legend.map(({ name, label, number }) => html`<span key=${label}><i class="key" style=${{ background: `var(--${name})` }} />${label} <b class="num">${number}</b></span>`)}<span class="hint">${hint}</span></p>
      <div class="blocks"><canvas ref=${canvas} role="img" aria-label=${said} onMouseMove=${point} onMouseLeave=${() => setHint("")} /></div>
    <//>`;
}

function blockAt(blocks, index) {
  let first = 0;
  for (const [state, number, owner] of blocks.states) {
    if (index < first + number) return `block ${index}: ${state}${owner ? `, ${owner}` : ""}`;
    first += number;
  }
  return "";
}

/** Draws every block as a square of its colour, a custom property's name. Returns the layout. */
function drawBlocks(canvas, names) {
  const width = canvas.parentElement.clientWidth;
  const side = [14, 12, 10, 8, 6, 5, 4, 3].find((each) => Math.ceil(names.length / Math.floor(width / each)) * each <= 240) ?? 2;
  const cells = Math.max(1, Math.floor(width / side));
  const tall = Math.max(1, Math.ceil(names.length / cells)) * side;
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = tall * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${tall}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const colors = new Map();
  const colorOf = (name) => {
    if (!colors.has(name)) {
      canvas.style.color = `var(--${name}, var(--block-used))`;
      colors.set(name, getComputedStyle(canvas).color);
    }
    return colors.get(name);
  };
  const gap = side > 4 ? 1 : 0;
  names.forEach((name, index) => {
    pen.fillStyle = colorOf(name);
    pen.fillRect((index % cells) * side, Math.floor(index / cells) * side, side - gap, side - gap);
  });
  canvas.style.color = "";
  return { cells, side };
}

// ---- steps, prefixes, tiers ---------------------------------------------------------------------

function Steps({ steps }) {
  const most = Math.max(1e-6, ...steps.map((step) => step.ms));
  const last = steps[steps.length - 1];
  const said = `The last ${steps.length} steps, at most ${millis(most)}`;
  return html`
    <${Panel} title="Last steps" aside=${last && html`<span class="num">longest ${millis(most)}</span>`}>
      ${steps.length === 0 ? html`<${Empty}>No step yet.<//>` : html`
        <svg class="steps" viewBox=${`0 0 ${steps.length * 10} ${STEP_TALL}`} preserveAspectRatio="none" height=${STEP_TALL} role="img" aria-label=${said}>
          ${steps.map((step, index) => html`
            <rect key=${index} class=${step.prefill_tokens ? "stage-prefill" : "stage-decode"} x=${index * 10 + 1} width="8" y=${STEP_TALL - (STEP_TALL - 4) * (step.ms / most)} height=${(STEP_TALL - 4) * (step.ms / most)}>
              <title>${`${millis(step.ms)}: ${step.prefill_tokens} prompt tokens, ${step.decode_rows} decode rows`}</title>
            </rect>`)}
        </svg>
        <p class="legend"><span><i class="key stage-prefill" />with prompt tokens</span><span><i class="key stage-decode" />decode only</span></p>
        <div class="scroll short" tabindex="0" role="region" aria-label="Last steps as a table"><table>
          <thead><tr><th>at</th><th class="r">took</th><th class="r">prompt tokens</th><th class="r">decode rows</th><th>requests</th></tr></thead>
          <tbody>${[...steps].reverse().map((step, index) => html`<tr key=${index}><td class="num">${clock(step.at)}</td><td class="r">${millis(step.ms)}</td><td class="r">${step.prefill_tokens}</td><td class="r">${step.decode_rows}</td><td class="ids id" title=${step.requests.join("\n")}>${step.requests.map(shortId).join(" ")}</td></tr>`)}</tbody>
        </table></div>`}
    <//>`;
}

function Prefixes({ prefixes }) {
  const rows = prefixRows(prefixes);
  const most = Math.max(1, ...rows.map((row) => row.blocks));
  return html`
    <${Panel} title="Prefix tree" aside=${html`<span class="num">${rows.length} prefixes</span>`}>
      ${rows.length === 0 ? html`<${Empty}>No prefix is cached.<//>` : html`
        <div class="scroll short" tabindex="0" role="region" aria-label="Prefix tree"><table>
          <thead><tr><th>prefix</th><th class="r">tokens</th><th class="r">blocks</th><th><span class="unseen">size</span></th><th class="r">hits</th></tr></thead>
          <tbody>${rows.map((row) => html`
            <tr key=${row.index}><td class="id" style=${{ paddingLeft: `${6 + Math.min(row.level, 12) * 12}px` }}>${row.level ? "└ " : ""}${row.key}</td><td class="r">${count(row.tokens)}</td><td class="r">${row.blocks}</td>
            <td class="size"><${Bar} share=${row.blocks / most} label="of the biggest" warn=${2} /></td><td class="r">${count(row.hits)}</td></tr>`)}</tbody>
        </table></div>`}
    <//>`;
}

const Tiers = ({ tiers }) => html`
  <${Panel} title="Tiers">
    ${tiers.length === 0 ? html`<${Empty}>This node has no tier below its pool.<//>` : html`
      <table><thead><tr><th>tier</th><th class="r">used</th><th class="r">of</th><th><span class="unseen">share</span></th><th class="r">hits</th></tr></thead>
      <tbody>${tiers.map((tier) => html`<tr key=${tier.name}><td>${tier.name}</td><td class="r">${bytes(tier.used_bytes)}</td><td class="r">${bytes(tier.total_bytes)}</td><td class="size"><${Bar} share=${tier.total_bytes ? tier.used_bytes / tier.total_bytes : 0} label=${tier.name} warn=${2} /></td><td class="r">${count(tier.hits)}</td></tr>`)}</tbody></table>`}
  <//>`;

// ---- the roofline: both axes logarithmic --------------------------------------------------------

function Roofline({ roofline }) {
  if (!roofline) return html`<${Panel} title="Roofline"><${Empty}>The node has not measured this machine's limits.<//><//>`;
  const { peak_gbs: peakGbs, peak_gflops: peakGflops, points } = roofline;
  const ridge = peakGflops / peakGbs;
  const at = points.map((point) => point.intensity).filter((value) => value > 0);
  const [low, high] = [Math.log10(Math.min(ridge / 10, ...at)), Math.log10(Math.max(ridge * 10, ...at))];
  const top = Math.log10(peakGflops * 1.6);
  const rates = points.map((point) => point.gflops).filter((value) => value > 0);
  const floor = Math.log10(Math.min(10 ** low * peakGbs, ...rates) / 2);
  const x = (value) => ROOF.left + ((Math.log10(value) - low) / (high - low)) * (ROOF.wide - ROOF.left - 8);
  const y = (value) => 6 + ((top - Math.log10(value)) / (top - floor)) * (ROOF.tall - ROOF.bottom - 6);
  const roof = `M${x(10 ** low)} ${y(10 ** low * peakGbs)} L${x(ridge)} ${y(peakGflops)} L${x(10 ** high)} ${y(peakGflops)}`;
  const decades = (from, to) => Array.from({ length: Math.max(0, Math.floor(to) - Math.ceil(from) + 1) }, (_, index) => 10 ** (Math.ceil(from) + index));
  const shown = points.filter((point) => point.intensity > 0 && point.gflops > 0);
  const said = `Roofline: ${count(peakGflops)} GFLOP/s at most, ${count(peakGbs)} GB/s. ${shown.length} steps: ${shown.slice(-3).map((point) => `${point.kind} ${count(point.gflops)} GFLOP/s at ${count(point.intensity)} FLOP per byte`).join("; ")}`;
  return html`
    <${Panel} title="Roofline" aside=${html`<span class="num">${count(peakGbs)} GB/s · ${count(peakGflops)} GFLOP/s</span>`}>
      <svg class="roofline" viewBox=${`0 0 ${ROOF.wide} ${ROOF.tall}`} role="img" aria-label=${said}>
        ${decades(low, high).map((value) => html`<${Fragment} key=${`x${value}`}><line class="grid-line" x1=${x(value)} x2=${x(value)} y1="6" y2=${ROOF.tall - ROOF.bottom} /><text class="axis" x=${x(value)} y=${ROOF.tall - 12} text-anchor="middle">${count(value)}</text><//>`)}
        ${decades(floor, top).map((value) => html`<${Fragment} key=${`y${value}`}><line class="grid-line" x1=${ROOF.left} x2=${ROOF.wide - 8} y1=${y(value)} y2=${y(value)} /><text class="axis" x=${ROOF.left - 4} y=${y(value) + 3} text-anchor="end">${count(value)}</text><//>`)}
        <path class="roof" d=${roof} />
        ${shown.map((point, index) => html`<circle key=${index} class=${`stage-${point.kind}${index === shown.length - 1 ? " now" : ""}`} cx=${x(point.intensity)} cy=${y(point.gflops)} r=${index === shown.length - 1 ? 5 : 3} opacity=${0.35 + (0.65 * (index + 1)) / shown.length}><title>${`${point.kind}: ${count(point.gflops)} GFLOP/s at ${count(point.intensity)} FLOP/byte`}</title></circle>`)}
        <text class="axis" x=${ROOF.wide - 8} y=${ROOF.tall - 3} text-anchor="end">FLOP per byte; GFLOP/s upwards</text>
      </svg>
      <p class="legend"><span><i class="key stage-prefill" />prefill</span><span><i class="key stage-decode" />decode</span></p>
    <//>`;
}
