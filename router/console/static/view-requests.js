// View 2: requests. Those under way, those that ended, one request's timeline, two beside each other.

import { askJson } from "./feed.js";
import { byStage, clock, count, failures, makers, millis, stageRows } from "./model.js";
import { download, Empty, Figure, html, NodeLink, Panel, RequestLink, useEffect, useMemo, useRepeated, useState } from "./parts.js";
import { colorOf, Gantt, Makers } from "./gantt.js";
import { keptApiKey } from "./stream.js";

const LISTS = [["live", "Under way"], ["ended", "Ended"], ["slowest", "Slowest"]];
const MOST_SLOWEST = 100;
const SLOWEST_EVERY_MS = 5000;
const RUNNING_EVERY_MS = 1000;
const MOST_MISSES = 3; // an ended request is here only when its client has read all

export function Requests({ state, consoleKey, rest }) {
  const [id, , other] = rest; // #/requests/ID or #/requests/ID/vs/OTHER
  return id
    ? html`<${Told} key=${`${id} ${other}`} id=${id} other=${other} state=${state} consoleKey=${consoleKey} />`
    : html`<${List} state=${state} consoleKey=${consoleKey} />`;
}

function List({ state, consoleKey }) {
  const [shown, setShown] = useState("ended");
  const [search, setSearch] = useState("");
  const [slowest, setSlowest] = useState(null);
  const [chosen, setChosen] = useState([]);
  useRepeated(async (isOpen) => {
    if (shown !== "slowest") return;
    try {
      const found = await askJson(`../v1/requests?slowest=true&limit=${MOST_SLOWEST}`, consoleKey);
      if (isOpen()) setSlowest(found.data);
    } catch { /* the head of the page says that the router is away */ }
  }, SLOWEST_EVERY_MS, [shown]);
  const { live, num_live, ended } = state.requests;
  const all = shown === "live" ? live : shown === "ended" ? ended : slowest ?? [];
  const rows = search ? all.filter((each) => [each.request_id, each.prefill_node, each.decode_node, each.tenant, each.error].some((text) => text?.includes(search))) : all;
  const open = (event) => {
    event.preventDefault();
    if (search.trim()) location.hash = `#/requests/${encodeURIComponent(search.trim())}`;
  };
  const choose = (id) => setChosen((had) => (had.includes(id) ? had.filter((each) => each !== id) : [...had, id].slice(-2)));
  const aside = html`
    <span class="tabs" role="group" aria-label="Which requests">
      ${LISTS.map(([name, title]) => html`<button key=${name} aria-pressed=${name === shown} onClick=${() => setShown(name)}>${title}${name === "live" ? html` <span class="num">${num_live}</span>` : ""}</button>`)}
    </span>
    <form onSubmit=${open}><input type="search" placeholder="id, node, tenant; Enter opens an id" aria-label="Search requests, Enter opens an id" value=${search} onInput=${(event) => setSearch(event.target.value)} /></form>
    ${shown !== "live" && html`<a class=${`button${chosen.length === 2 ? "" : " off"}`} aria-disabled=${chosen.length !== 2} href=${chosen.length === 2 ? `#/requests/${chosen.map(encodeURIComponent).join("/vs/")}` : null}>Compare two</a>`}`;
  return html`
    <${Panel} title="Requests" aside=${aside}>
      ${rows.length === 0
        ? html`<${Empty}>${shown === "live" ? "No request is under way." : shown === "slowest" && !slowest ? "Asking the router …" : "None here."}<//>`
        : shown === "live" ? html`<${LiveTable} rows=${rows} />` : html`<${EndedTable} rows=${rows} chosen=${chosen} choose=${choose} />`}
    <//>`;
}

const LiveTable = ({ rows }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label="Requests under way"><table>
    <thead><tr><th>request</th><th>stage</th><th class="r">age</th><th class="r">prompt</th><th class="r">output</th><th>prefill</th><th>decode</th><th class="r">retries</th><th class="r">moves</th><th>tenant</th></tr></thead>
    <tbody>${rows.map((each) => html`
      <tr key=${each.request_id}>
        <td><${RequestLink} id=${each.request_id} whole /></td><td>${each.stage}</td><td class="r">${millis(each.age_ms)}</td>
        <td class="r">${count(each.prompt_tokens)}</td><td class="r">${count(each.output_tokens)}</td>
        <td><${NodeLink} id=${each.prefill_node} /></td><td><${NodeLink} id=${each.decode_node} /></td>
        <td class=${`r${each.retries ? " warn" : ""}`}>${each.retries}</td><td class="r">${each.migrations}</td><td>${each.tenant ?? ""}</td>
      </tr>`)}</tbody>
  </table></div>`;

const EndedTable = ({ rows, chosen, choose }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label="Requests that ended"><table>
    <thead><tr><th><span class="unseen">compare</span></th><th>request</th><th>at</th><th class="r">total</th><th class="r">TTFT</th><th class="r">prompt</th><th class="r">cached</th><th class="r">output</th><th>prefill</th><th>decode</th><th class="r">retries</th><th>outcome</th></tr></thead>
    <tbody>${rows.map((each) => html`
      <tr key=${each.request_id}>
        <td><input type="checkbox" aria-label=${`Compare ${each.request_id}`} checked=${chosen.includes(each.request_id)} onChange=${() => choose(each.request_id)} /></td>
        <td><${RequestLink} id=${each.request_id} whole /></td><td class="num">${clock(each.arrived_at)}</td>
        <td class="r">${millis(each.total_ms)}</td><td class="r">${millis(each.ttft_ms)}</td><td class="r">${count(each.prompt_tokens)}</td><td class="r">${count(each.cached_tokens)}</td><td class="r">${count(each.output_tokens)}</td>
        <td><${NodeLink} id=${each.prefill_node} /></td><td><${NodeLink} id=${each.decode_node} /></td>
        <td class=${`r${each.retries ? " warn" : ""}`}>${each.retries}</td><td class=${each.outcome === "failed" ? "bad" : ""} title=${each.error ?? ""}>${each.outcome}</td>
      </tr>`)}</tbody>
  </table></div>`;

const addressOf = (id) => `v1/requests/${encodeURIComponent(id)}/timeline`;

/** A timeline, with the text that the operator's key may see, or else the API key of this tab. */
async function askTimeline(id, consoleKey, apiKey) {
  const timeline = await askJson(`../${addressOf(id)}?text=true`, consoleKey);
  if (!timeline.text && apiKey && !isRunning(timeline)) {
    try {
      timeline.text = (await askJson(`api/${addressOf(id)}?text=true`, apiKey)).text;
    } catch { /* another tenant's */ }
  }
  return timeline;
}

const isRunning = (timeline) => timeline.outcome === "running";

/** What a request's timeline says, asked again until it has ended; {error} if there is none. */
function useTimeline(id, consoleKey, apiKey) {
  const [found, setFound] = useState(null);
  useEffect(() => {
    if (!id) return undefined;
    let [open, timer, last, misses] = [true, null, null, 0];
    const turn = async () => {
      try {
        last = await askTimeline(id, consoleKey, apiKey);
        misses = 0;
        if (open) setFound({ timeline: last });
      } catch (error) {
        misses += 1;
        if (open && !last) setFound({ error: error.message });
      }
      if (open && last && isRunning(last) && misses < MOST_MISSES) timer = setTimeout(turn, RUNNING_EVERY_MS);
    };
    turn();
    return () => {
      open = false;
      clearTimeout(timer);
    };
  }, [id]);
  return found;
}

function Told({ id, other, state, consoleKey }) {
  const apiKey = state.router.needs_api_key ? keptApiKey() : "";
  const one = useTimeline(id, consoleKey, apiKey);
  const two = useTimeline(other, consoleKey, apiKey);
  const listed = [one, two].filter((each) => each?.timeline).map((each) => each.timeline);
  const end = Math.max(1, ...listed.map((timeline) => timeline.total_ms));
  const underWay = state.requests.live.find((each) => each.request_id === id);
  return html`
    <p class="back"><a href="#/requests">← Requests</a></p>
    ${underWay && html`<p role="status">Under way: ${underWay.stage}, ${underWay.output_tokens} tokens. This is its timeline so far.</p>`}
    ${listed.length === 2 && html`<${Compared} one=${listed[0]} two=${listed[1]} />`}
    ${[one, two].map((each, index) => each && (each.timeline
      ? html`<${Timeline} key=${index} timeline=${each.timeline} end=${end} consoleKey=${consoleKey} />`
      : html`<p key=${index} role="alert" class="bad">${each.error}</p>`))}
    ${!one && html`<${Empty}>Asking the router …<//>`}`;
}

function Timeline({ timeline, end, consoleKey }) {
  const troubles = failures(timeline);
  const made = useMemo(() => makers(timeline), [timeline]);
  const name = timeline.request_id;
  const save = async () => download(`${name}.trace.json`, await askJson(`../${addressOf(name)}?format=perfetto`, consoleKey));
  const aside = html`<button onClick=${save}>Trace for Perfetto</button>`;
  return html`
    <${Panel} title=${`Timeline of ${name}`} aside=${aside} className="timeline">
      <dl class="figures small">
        <${Figure} name="Total">${millis(timeline.total_ms)}<//>
        <${Figure} name="TTFT">${millis(timeline.ttft_ms)}<//>
        <${Figure} name="Prompt" note=${timeline.cached_tokens ? ` ${timeline.cached_tokens} cached` : null}>${count(timeline.prompt_tokens)}<//>
        <${Figure} name="Output">${count(timeline.output_tokens)}<//>
        <${Figure} name="Retries">${timeline.retries}<//>
        <${Figure} name="Migrations">${timeline.migrations}<//>
        <${Figure} name="Preemptions">${timeline.preemptions}<//>
        ${timeline.log && html`<${Figure} name="Log appends" note=${` ${millis(timeline.log.total_ms)}`}>${count(timeline.log.appends)}<//>`}
        <${Figure} name="Outcome"><span class=${timeline.outcome === "failed" ? "bad" : ""}>${timeline.error ?? timeline.outcome}</span><//>
        <${Figure} name="Arrived">${clock(timeline.arrived_at)}<//>
      </dl>
      ${troubles.map((trouble, index) => html`
        <p key=${index} class="trouble"><b class="bad">Epoch ${trouble.epoch} failed</b>${trouble.node && html` on <${NodeLink} id=${trouble.node} />`}: ${trouble.why}${trouble.next && html` — <b><${NodeLink} id=${trouble.next} /> went on</b>`}</p>`)}
      <${Gantt} timeline=${timeline} end=${end} />
      <${Makers} made=${made} total=${timeline.output_tokens} />
      <${Stages} timeline=${timeline} />
      ${timeline.scores.length > 0 && html`<${Scores} scores=${timeline.scores} />`}
      ${timeline.text && html`<${Texts} text=${timeline.text} />`}
    <//>`;
}

const Texts = ({ text }) => html`
  <h3>Prompt${text.cut ? ", cut" : ""}</h3>
  <pre class="text" tabindex="0" role="region" aria-label="Prompt">${text.prompt}</pre>
  ${text.answers.map((answer, index) => html`
    <h3 key=${`h${index}`}>${text.answers.length > 1 ? `Answer ${index + 1}` : "Answer"}</h3>
    <pre key=${index} class="text" tabindex="0" role="region" aria-label=${`Answer ${index + 1}`}>${answer}</pre>`)}`;

function Stages({ timeline }) {
  const spans = stageRows(timeline);
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Stages as a table"><table>
      <thead><tr><th>stage</th><th>node</th><th class="r">start</th><th class="r">took</th><th class="r">tokens</th><th class="r">epoch</th><th>note</th></tr></thead>
      <tbody>${spans.map((span, index) => html`
        <tr key=${index}><td class=${span.isLayers ? "part layers" : span.isPart ? "part" : ""}><i class=${`key ${colorOf(span)}`} />${span.stage}</td><td><${NodeLink} id=${span.node} /></td><td class="r">${millis(span.start_ms)}</td>
        <td class="r">${millis(span.end_ms - span.start_ms)}</td><td class="r">${span.tokens ? `${span.tokens[0] + 1}–${span.tokens[1]}` : ""}</td><td class="r">${span.epoch}</td><td class="why">${span.why ?? ""}</td></tr>`)}</tbody>
    </table></div>`;
}

const Scores = ({ scores }) => html`
  <h3>Why these nodes</h3>
  <div class="scroll" tabindex="0" role="region" aria-label="Scores of the nodes"><table>
    <thead><tr><th>node</th><th>role</th><th>chosen</th><th class="r">cost</th><th class="r">queued</th><th class="r">cached</th><th class="r">free blocks</th><th class="r">expected</th></tr></thead>
    <tbody>${scores.map((each) => html`
      <tr key=${`${each.node}${each.role}`}><td><${NodeLink} id=${each.node} /></td><td>${each.role}</td><td>${each.chosen ? "yes" : ""}</td><td class="r">${count(each.cost)}</td><td class="r">${count(each.queued)}</td><td class="r">${count(each.cached_tokens)}</td><td class="r">${count(each.free_blocks)}</td><td class="r">${millis(each.expected_ms)}</td></tr>`)}</tbody>
  </table></div>`;

function Compared({ one, two }) {
  const [left, right] = [byStage(one), byStage(two)];
  const rows = [["total", one.total_ms, two.total_ms], ["TTFT", one.ttft_ms, two.ttft_ms],
    ...[...new Set([...left.keys(), ...right.keys()])].map((stage) => [stage, left.get(stage) ?? 0, right.get(stage) ?? 0])];
  return html`
    <${Panel} title="Two requests">
      <div class="scroll" tabindex="0" role="region" aria-label="Comparison"><table>
        <thead><tr><th>where the time went</th><th class="r"><span class="id">${one.request_id}</span></th><th class="r"><span class="id">${two.request_id}</span></th><th class="r">difference</th></tr></thead>
        <tbody>${rows.map(([name, a, b]) => html`<tr key=${name}><td>${name}</td><td class="r">${millis(a)}</td><td class="r">${millis(b)}</td><td class="r">${a === null || b === null ? "" : `${b - a < 0 ? "−" : "+"}${millis(Math.abs(b - a))}`}</td></tr>`)}</tbody>
      </table></div>
    <//>`;
}
