// View 5: what happened to the cluster, the newest first.

import { clock } from "./model.js";
import { Empty, html, NodeLink, Panel, RequestLink, useMemo, useState } from "./parts.js";

const BAD = new Set(["node-lost", "node-refused", "quarantine", "refused-key", "store", "broken"]);
const WARN = new Set(["retry", "migration", "drain"]);
const level = (kind) => (BAD.has(kind) ? "bad" : WARN.has(kind) ? "warn" : "");

export function Events({ state }) {
  const [hidden, setHidden] = useState(() => new Set());
  const [search, setSearch] = useState("");
  const kinds = useMemo(() => {
    const sums = new Map();
    for (const event of state.events) sums.set(event.kind, (sums.get(event.kind) ?? 0) + 1);
    return [...sums].sort((a, b) => a[0].localeCompare(b[0]));
  }, [state.events]);
  const rows = [...state.events].reverse().filter((event) => !hidden.has(event.kind)
    && (!search || `${event.node} ${event.request_id} ${event.text}`.includes(search)));
  const turn = (kind) => setHidden((had) => {
    const next = new Set(had);
    if (!next.delete(kind)) next.add(kind);
    return next;
  });
  const aside = html`<input type="search" placeholder="node, request, text" aria-label="Search events" value=${search} onInput=${(event) => setSearch(event.target.value)} />`;
  return html`
    <${Panel} title="Events" aside=${aside}>
      <p class="chips" role="group" aria-label="Kinds of events">
        ${kinds.map(([kind, number]) => html`<button key=${kind} aria-pressed=${!hidden.has(kind)} onClick=${() => turn(kind)}>${kind} <span class="num">${number}</span></button>`)}
      </p>
      ${rows.length === 0 ? html`<${Empty}>Nothing to tell.<//>` : html`<${EventTable} events=${rows} />`}
    <//>`;
}

export const EventTable = ({ events }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label="List of events"><table>
    <thead><tr><th>at</th><th>kind</th><th>node</th><th>request</th><th>what</th></tr></thead>
    <tbody>${events.map((event) => html`
      <tr key=${event.seq}><td class="num">${clock(event.at)}</td><td><span class=${`state ${level(event.kind)}`}>${event.kind}</span></td><td><${NodeLink} id=${event.node} /></td><td>${event.request_id ? html`<${RequestLink} id=${event.request_id} />` : ""}</td><td class="why">${event.text}</td></tr>`)}</tbody>
  </table></div>`;
