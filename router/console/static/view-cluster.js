// View 1: the cluster. Prefill nodes left, decode nodes right, the KV between them as lines.

import { busiest, byRole, bytes, count, flowLines, isWell, kvShare, laneStates, millis, millisShort, percent } from "./model.js";
import { Bar, Chart, Empty, Figure, html, Panel, State, useMemo, useState } from "./parts.js";

const CARD_HEIGHT = 92; // with its gap; console.css has the same
const MOST_CARDS = 24; // of a role; more nodes are shown as squares, with cards for the busiest
const GROUP_CARDS = 8;
const CARD_GAP = 24; // lines keep clear of a card's ends
const WIDEST = 16;
const NONE = [];

export function Cluster({ state, history, theme }) {
  return html`
    <${Totals} state=${state} />
    <div class="charts"><${Charts} history=${history} theme=${theme} /></div>
    <${Health} store=${state.store} flows=${state.flows ?? NONE} />
    <${Nodes} nodes=${state.nodes} flows=${state.flows ?? NONE} />`;
}

function Totals({ state }) {
  const { totals } = state;
  return html`
    <dl class="figures">
      <${Figure} name="Running">${count(totals.running)}<//>
      <${Figure} name="Waiting">${count(totals.waiting)}<//>
      <${Figure} name="Requests/s">${count(totals.requests_per_s)}<//>
      <${Figure} name="TTFT p50">${millis(totals.ttft_ms.p50)}<//>
      <${Figure} name="TPOT p50">${millis(totals.tpot_ms.p50)}<//>
      <${Figure} name="Prompt tokens/s">${count(totals.prompt_tokens_per_s)}<//>
      <${Figure} name="Output tokens/s">${count(totals.output_tokens_per_s)}<//>
      <${Figure} name="Refused/s">${count(totals.refused_per_s)}<//>
      <${Figure} name="Retried/s">${count(totals.retried_per_s)}<//>
      <${Figure} name="Failed/s">${count(totals.failed_per_s)}<//>
    </dl>`;
}

const LEVELS = { healthy: "well", degraded: "warn", failing: "bad" };

/** One line each for the store and for every lane that carried KV in the last seconds. */
function Health({ store, flows }) {
  const lanes = useMemo(() => laneStates(flows), [flows]);
  return html`
    <ul class="health" aria-label="Store and lanes">
      <li><b>store</b> <span class="id">${store.kind}</span> <span class=${`state ${store.ok ? "well" : "bad"}`}>${store.ok ? "healthy" : "away"}</span>${store.text !== "answers" && html`<span class="hint">${store.text}</span>`}</li>
      ${lanes.length === 0 && html`<li><b>lanes</b><span class="hint">no KV moved in the last seconds</span></li>`}
      ${lanes.map((each) => html`
        <li key=${each.lane} data-lane=${each.lane}><b>lane</b> <a class="id" href="#/transfer">${each.lane}</a> <span class=${`state ${LEVELS[each.state]}`}>${each.state}</span>
          <span class="num">${bytes(each.bytes_per_s)}/s · ${count(each.pairs)} ${each.pairs === 1 ? "pair" : "pairs"} · p99 ${millisShort(each.ms_p99)}${each.faults ? html` · <b class="bad">${count(each.faults)} faults</b>` : ""}${each.instead.length ? html` · <b class="bad">fell back to ${each.instead.join(", ")}</b>` : ""}</span></li>`)}
    </ul>`;
}

function Charts({ history, theme }) {
  const at = useMemo(() => history.map((each) => each.at), [history]);
  const line = (label, color, pick, dash) => ({ label, color, dash, values: history.map((each) => pick(each.totals)) });
  const shown = useMemo(() => [
    ["TTFT", millisShort, [line("p50", "--accent", (t) => t.ttft_ms.p50), line("p95", "--ink-2", (t) => t.ttft_ms.p95), line("p99", "--faint-ink", (t) => t.ttft_ms.p99, [3, 3])]],
    ["TPOT", millisShort, [line("p50", "--accent", (t) => t.tpot_ms.p50), line("p95", "--ink-2", (t) => t.tpot_ms.p95), line("p99", "--faint-ink", (t) => t.tpot_ms.p99, [3, 3])]],
    ["Tokens/s", count, [line("output", "--accent", (t) => t.output_tokens_per_s), line("prompt", "--ink-2", (t) => t.prompt_tokens_per_s)]],
    ["Trouble/s", count, [line("refused", "--ink-2", (t) => t.refused_per_s), line("retried", "--warn", (t) => t.retried_per_s), line("failed", "--bad", (t) => t.failed_per_s)]],
  ], [history]);
  return shown.map(([title, format, lines]) => html`
    <${Chart} key=${title} title=${title} at=${at} lines=${lines} format=${format} theme=${theme} />`);
}

function Nodes({ nodes, flows }) {
  const [search, setSearch] = useState("");
  const found = useMemo(
    () => (search ? nodes.filter((node) => `${node.id} ${node.state} ${node.address}`.includes(search)) : nodes),
    [nodes, search]);
  const sides = ["prefill", "decode"].map((role) => {
    const all = byRole(found, role);
    const grouped = all.length > MOST_CARDS;
    return { role, all, grouped, cards: grouped ? busiest(all, flows, GROUP_CARDS) : all };
  });
  const [left, right] = sides;
  const unknown = byRole(found, null).slice(0, MOST_CARDS);
  const rows = (side) => new Map(side.cards.map((node, index) => [node.id, index]));
  const lines = flowLines(flows, rows(left), rows(right), WIDEST, CARD_HEIGHT - CARD_GAP);
  const moved = flows.reduce((sum, flow) => sum + flow.bytes_per_s, 0);
  const away = nodes.filter((node) => !isWell(node)).length;
  const aside = html`
    <span class="num">${nodes.length} nodes${away ? html`, <b class="bad">${away} not serving</b>` : ""} · KV ${bytes(moved)}/s</span>
    <input type="search" placeholder="node, state, address" aria-label="Search nodes" value=${search} onInput=${(event) => setSearch(event.target.value)} />`;
  const tall = Math.max(1, left.cards.length, right.cards.length) * CARD_HEIGHT;
  return html`
    <${Panel} title="Nodes" aside=${aside}>
      ${nodes.length === 0 && html`<${Empty}>No node is connected.<//>`}
      ${sides.some((side) => side.grouped) && html`
        <div class="squares">${sides.map((side) => side.grouped && html`<${Squares} key=${side.role} side=${side} />`)}</div>`}
      <div class="flow">
        <${Column} side=${left} />
        <${Lines} lines=${lines} tall=${tall} />
        <${Column} side=${right} />
      </div>
      ${unknown.length > 0 && html`
        <h3>Not connected</h3>
        <ul class="plain-list">${unknown.map((node) => html`<li key=${node.id}><span class="id">${node.address}</span> <${State} node=${node} /> ${node.text}</li>`)}</ul>`}
    <//>`;
}

const Column = ({ side }) => html`
  <div class="column">
    <h3>${side.grouped ? `${side.role}: ${side.cards.length} of ${side.all.length}, lost or busiest` : `${side.role} ${side.all.length}`}</h3>
    <ul class="cards">${side.cards.map((node) => html`<li key=${node.id}><${Card} node=${node} /></li>`)}</ul>
  </div>`;

const Card = ({ node }) => html`
  <a class=${`card ${isWell(node) ? "" : "away"}`} href=${`#/node/${encodeURIComponent(node.id)}`}>
    <span class="row"><b class="id">${node.id}</b><${State} node=${node} /></span>
    ${node.state !== "lost" && html`<${Bar} share=${kvShare(node)} label="KV blocks in use" />`}
    ${node.state === "lost"
      ? html`<span class="row">${node.text}</span>`
      : html`
        <span class="row num"><span>KV ${percent(kvShare(node))}</span><span class="wide">${count(node.tokens_per_s)} tok/s</span></span>
        <span class="row num">
          <span>${node.running} run${node.waiting ? html` · ${node.waiting} wait` : ""}</span>
          <span class="wide">MBU ${percent(node.mbu)} · MFU ${percent(node.mfu)}</span>
        </span>`}
  </a>`;

const lanesOf = (pair) => pair.lanes.map((flow) => flow.lane).join(", ");

function Lines({ lines, tall }) {
  const y = (row) => row * CARD_HEIGHT + CARD_HEIGHT / 2 - 4;
  const widest = lines.reduce((most, { flow }) => Math.max(most, flow.bytes_per_s), 0);
  const said = lines.length
    ? `KV flows: ${lines.slice(0, 8).map(({ flow }) => `${flow.from} to ${flow.to} ${bytes(flow.bytes_per_s)} per second by ${lanesOf(flow)}`).join("; ")}`
    : "No KV moved in the last seconds";
  return html`
    <div class="lines">
      <h3>${lines.length ? html`widest <span class="num">${bytes(widest)}/s</span>` : "no KV moves"}</h3>
      <svg height=${tall} viewBox=${`0 0 100 ${tall}`} preserveAspectRatio="none" role="img" aria-label=${said}>
        ${lines.map(({ flow, from, to, width, fromShift, toShift }) => html`
          <path key=${`${flow.from} ${flow.to}`} class=${flow.faults ? "fault" : ""} stroke-width=${width} vector-effect="non-scaling-stroke"
            d=${curve(y(from) + fromShift, y(to) + toShift)}>
            <title>${`${flow.from} → ${flow.to}: ${bytes(flow.bytes_per_s)}/s by ${lanesOf(flow)}${flow.faults ? `, ${flow.faults} faults` : ""}`}</title>
          </path>`)}
      </svg>
    </div>`;
}

const curve = (from, to) => `M0 ${from} C 45 ${from}, 55 ${to}, 100 ${to}`;

/** All nodes of a role as squares, the darker the fuller: a thousand fit on one screen. */
function Squares({ side }) {
  const away = side.all.filter((node) => !isWell(node)).length;
  const mean = side.all.reduce((sum, node) => sum + kvShare(node), 0) / side.all.length;
  const open = (event) => {
    const id = event.target.dataset?.node;
    if (id) location.hash = `#/node/${encodeURIComponent(id)}`;
  };
  const said = `${side.all.length} ${side.role} nodes, KV ${percent(mean)} full on average, ${away} not serving. The search finds each.`;
  return html`
    <div>
      <h3>${side.role} <span class="num">${side.all.length}</span>${away ? html` · <b class="bad num">${away} not serving</b>` : ""} · KV ${percent(mean)}</h3>
      <div class="grid" role="img" aria-label=${said} onClick=${open}>
        ${side.all.map((node) => html`<i key=${node.id} data-node=${node.id} title=${`${node.id}: ${node.state}, KV ${percent(kvShare(node))}, ${node.running} running`}
          class=${isWell(node) ? `f${Math.min(4, Math.floor(kvShare(node) * 5))}` : "away"} />`)}
      </div>
    </div>`;
}
