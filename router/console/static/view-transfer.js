// View 4: KV between nodes. A matrix of prefill nodes by decode nodes, and the busiest pairs.

import { bytes, count, matrix, millis, pairsOf } from "./model.js";
import { Empty, html, NodeLink, Panel, useMemo, useState } from "./parts.js";

const MOST_ROWS = 16;
const MOST_PAIRS = 60;
const SHADES = 5;

export function Transfer({ state }) {
  const [search, setSearch] = useState("");
  const flows = state.flows ?? [];
  const found = useMemo(
    () => flows.filter((flow) => `${flow.from} ${flow.to} ${flow.lane}`.includes(search)),
    [flows, search]);
  const table = matrix(found, MOST_ROWS);
  const sum = found.reduce((total, flow) => total + flow.bytes_per_s, 0);
  const faults = found.reduce((total, flow) => total + flow.faults, 0);
  const aside = html`
    <span class="num">${count(pairsOf(found).length)} pairs · ${bytes(sum)}/s${faults ? html` · <b class="bad">${faults} faults</b>` : ""}</span>
    <input type="search" placeholder="node or lane" aria-label="Search pairs" value=${search} onInput=${(event) => setSearch(event.target.value)} />`;
  return html`
    <${Panel} title="KV transfer" aside=${aside}>
      ${found.length === 0 ? html`<${Empty}>No KV moved in the last seconds.<//>` : html`<${Matrix} table=${table} />`}
    <//>
    ${found.length > 0 && html`<${Pairs} flows=${found} />`}`;
}

function Matrix({ table }) {
  const cells = table.rows.flatMap((from) => table.columns.map((to) => table.cell(from, to))).filter(Boolean);
  const most = Math.max(1, ...cells.map((pair) => pair.bytes_per_s));
  const shade = (pair) => Math.min(SHADES - 1, Math.floor((pair.bytes_per_s / most) * SHADES));
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Matrix of transfers"><table class="matrix">
      <caption class="unseen">Rows send KV, columns receive it.</caption>
      <thead><tr><th scope="col">from / to</th>${table.columns.map((id) => html`<th key=${id} scope="col"><${NodeLink} id=${id} /></th>`)}</tr></thead>
      <tbody>${table.rows.map((from) => html`
        <tr key=${from}><th scope="row"><${NodeLink} id=${from} /></th>${table.columns.map((to) => {
          const pair = table.cell(from, to);
          return pair
            ? html`<td key=${to} class=${`flow-cell f${shade(pair)}${pair.faults ? " fault" : ""}`} title=${pair.lanes.map((flow) => `${flow.lane}: ${bytes(flow.bytes_per_s)}/s`).join("\n")}>
                <b class="num">${bytes(pair.bytes_per_s)}/s</b><span>${pair.lanes[0].lane}${pair.lanes.length > 1 ? ` +${pair.lanes.length - 1}` : ""} · p99 ${millis(pair.ms_p99)}</span>${pair.faults ? html`<span class="faults">${pair.faults} faults${pair.fellFrom.length ? ` of ${pair.fellFrom.join(", ")}` : ""}</span>` : ""}</td>`
            : html`<td key=${to} class="none">·</td>`;
        })}</tr>`)}</tbody>
    </table></div>`;
}

function Pairs({ flows }) {
  const rows = [...flows].sort((a, b) => b.bytes_per_s - a.bytes_per_s).slice(0, MOST_PAIRS);
  return html`
    <${Panel} title="Busiest pairs, by lane">
      <div class="scroll" tabindex="0" role="region" aria-label="Busiest pairs"><table>
        <thead><tr><th>from</th><th>to</th><th>lane</th><th class="r">GB/s</th><th class="r">transfers/s</th><th class="r">p50</th><th class="r">p99</th><th class="r">faults</th></tr></thead>
        <tbody>${rows.map((flow) => html`
          <tr key=${`${flow.from} ${flow.to} ${flow.lane}`}><td><${NodeLink} id=${flow.from} /></td><td><${NodeLink} id=${flow.to} /></td><td>${flow.lane}</td><td class="r">${(flow.bytes_per_s / 1e9).toFixed(4)}</td><td class="r">${count(flow.transfers_per_s)}</td><td class="r">${millis(flow.ms_p50)}</td><td class="r">${millis(flow.ms_p99)}</td><td class=${`r${flow.faults ? " bad" : ""}`}>${flow.faults}</td></tr>`)}</tbody>
      </table></div>
    <//>`;
}
