// View 7, with `baton up --demo` only: faults on purpose, and beside them a stream that goes on.

import { postJson } from "./feed.js";
import { byRole } from "./model.js";
import { Empty, html, Panel, State, useEffect, useRef, useState } from "./parts.js";
import { keepApiKey, keptApiKey, numTokens, StreamFigures, StreamText, useStream } from "./stream.js";
import { EventTable } from "./view-events.js";

const ACTIONS = [["kill", "Kill -9"], ["stop", "Stop"], ["resume", "Resume"], ["slow", "Slow"]];
const LANE = ["slow-lane", "Slow lane"]; // of a node that sends KV; once more: as before
const STREAM_TOKENS = 400;
const PAUSE_MS = 1500; // between two streams
const MOST_EVENTS = 12;

export function BreakIt({ state, consoleKey }) {
  if (!state.router.demo) return html`<${Empty}>Only with <code>baton up --demo</code>.<//>`;
  return html`
    <div class="side">
      <${Nodes} state=${state} consoleKey=${consoleKey} />
      <${Running} state=${state} consoleKey=${consoleKey} />
    </div>
    <${Panel} title="What happened">
      ${state.events.length ? html`<${EventTable} events=${[...state.events].reverse().slice(0, MOST_EVENTS)} />` : html`<${Empty}>Nothing yet.<//>`}
    <//>`;
}

function Nodes({ state, consoleKey }) {
  const [said, setSaid] = useState("");
  const nodes = [...byRole(state.nodes, "prefill"), ...byRole(state.nodes, "decode")];
  const act = async (node, action) => {
    setSaid(`${action} ${node} …`);
    try {
      const { done } = await (await postJson("data/break", consoleKey, { node, action })).json();
      setSaid(done);
    } catch (error) {
      setSaid(`${action} ${node}: ${error.message}`);
    }
  };
  return html`
    <${Panel} title="Break a node or a lane">
      <div class="scroll" tabindex="0" role="region" aria-label="Nodes to break"><table>
        <thead><tr><th>node</th><th>role</th><th>state</th><th>faults</th></tr></thead>
        <tbody>${nodes.map((node) => html`
          <tr key=${node.id}><td class="id">${node.id}</td><td>${node.role}</td><td><${State} node=${node} /></td>
          <td class="actions">${(node.role === "prefill" ? [...ACTIONS, LANE] : ACTIONS).map(([action, title]) => html`<button key=${action} class=${action === "kill" ? "danger" : ""} aria-label=${`${title} ${node.id}`} onClick=${() => act(node.id, action)}>${title}</button>`)}</td></tr>`)}</tbody>
      </table></div>
      <p class="hint">Slow lane: KV that leaves this node is late, until you press it again.</p>
      <p role="status" class="said">${said}</p>
    <//>`;
}

function Running({ state, consoleKey }) {
  const [run, start, stop] = useStream(consoleKey);
  const [on, setOn] = useState(true);
  const [apiKey, setApiKey] = useState(keptApiKey);
  const ended = useRef(0);
  const needed = state.router.needs_api_key && !apiKey;
  const ask = () => start("completions", {
    model: state.router.models[0], prompt: "PagedAttention is", max_tokens: STREAM_TOKENS, ignore_eos: true,
    temperature: 0, logprobs: 0,
  });
  useEffect(() => {
    if (!on || needed) {
      stop();
      return undefined;
    }
    let open = true;
    const turn = async () => {
      while (open) {
        const done = await ask();
        if (done.status === "ended") ended.current += 1;
        await new Promise((resume) => setTimeout(resume, PAUSE_MS));
      }
    };
    turn();
    return () => { open = false; };
  }, [on, needed]);
  const mine = state.requests.live.find((each) => run.id?.includes(each.request_id) || each.request_id.includes(run.id ?? " "));
  const aside = html`<span class="num">${ended.current} ended whole</span> <button onClick=${() => setOn(!on)} aria-pressed=${on}>${on ? "Pause" : "Go on"}</button>`;
  return html`
    <${Panel} title="A stream, over and over" aside=${aside}>
      ${state.router.needs_api_key && html`<p><label>API key <input type="password" autocomplete="off" value=${apiKey} onChange=${(event) => { keepApiKey(event.target.value); setApiKey(event.target.value); }} /></label></p>`}
      <${StreamFigures} run=${run} />
      <p class="hint num">${mine ? `${mine.stage} on ${mine.decode_node ?? mine.prefill_node ?? "no node yet"}, ${mine.retries} retries, ${mine.migrations} moves` : run.status} · token ${numTokens(run)} of ${STREAM_TOKENS}</p>
      <progress max=${STREAM_TOKENS} value=${numTokens(run)} aria-label="Tokens of this stream" />
      <${StreamText} run=${run} colors="node" />
    <//>`;
}
