// View 6: the playground. One prompt through the router's public API, with its parameters.

import { html, Panel, useState } from "./parts.js";
import { keepApiKey, keptApiKey, StreamFigures, StreamText, useStream } from "./stream.js";

const MODES = [["chat", "Chat"], ["completion", "Completion"], ["tools", "Tools"], ["schema", "JSON schema"]];
const NUMBERS = [
  ["max_tokens", "Max tokens", 128, 1, 1], ["temperature", "Temperature", 0, 0, 0.1],
  ["top_p", "Top p", 1, 0, 0.05], ["seed", "Seed", "", 0, 1],
];
const TOOLS = JSON.stringify([{ type: "function", function: {
  name: "look_up", description: "Looks up a term.",
  parameters: { type: "object", properties: { term: { type: "string" } }, required: ["term"] },
} }], null, 2);
const SCHEMA = JSON.stringify({ type: "object", properties: {
  term: { type: "string" }, known: { type: "boolean" },
}, required: ["term", "known"], additionalProperties: false }, null, 2);

export function Playground({ state, consoleKey }) {
  const [mode, setMode] = useState("chat");
  const [colors, setColors] = useState("node");
  const [given, setGiven] = useState({
    model: "", system: "", prompt: "What is PagedAttention?", tools: TOOLS, schema: SCHEMA, logprobs: true,
    max_tokens: 128, temperature: 0, top_p: 1, seed: "",
  });
  const [fault, setFault] = useState("");
  const [apiKey, setApiKey] = useState(keptApiKey);
  const [run, start, stop] = useStream(consoleKey);
  const { models } = state.router;
  const set = (name) => (event) => {
    const { target } = event;
    setGiven((had) => ({ ...had, [name]: target.type === "checkbox" ? target.checked : target.value }));
  };
  const send = (event) => {
    event.preventDefault();
    try {
      keepApiKey(apiKey);
      const [path, body] = bodyOf(mode, { ...given, model: given.model || models[0] });
      setFault("");
      start(path, body);
    } catch (error) {
      setFault(error.message);
    }
  };
  const enter = (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event); };
  return html`
    <div class="side">
      <${Panel} title="Request" aside=${html`<span class="tabs" role="group" aria-label="Kind of request">${MODES.map(([name, title]) => html`<button key=${name} aria-pressed=${mode === name} onClick=${() => setMode(name)}>${title}</button>`)}</span>`}>
        <form class="ask" onSubmit=${send} onKeyDown=${enter}>
          <label class="wide">Model <select value=${given.model || models[0]} onChange=${set("model")}>${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
          ${mode !== "completion" && html`<label class="wide">System <input value=${given.system} onInput=${set("system")} /></label>`}
          <label class="wide">Prompt <textarea rows="4" required value=${given.prompt} onInput=${set("prompt")} /></label>
          ${mode === "tools" && html`<label class="wide">Tools (JSON) <textarea rows="9" class="code" spellcheck=${false} value=${given.tools} onInput=${set("tools")} /></label>`}
          ${mode === "schema" && html`<label class="wide">Schema (JSON) <textarea rows="9" class="code" spellcheck=${false} value=${given.schema} onInput=${set("schema")} /></label>`}
          ${NUMBERS.map(([name, title, , least, step]) => html`<label key=${name}>${title} <input type="number" min=${least} step=${step} value=${given[name]} onInput=${set(name)} /></label>`)}
          <label class="wide check"><input type="checkbox" checked=${given.logprobs} onChange=${set("logprobs")} /> log-probabilities (needed for colours)</label>
          ${state.router.needs_api_key && html`<label class="wide">API key <input type="password" autocomplete="off" value=${apiKey} onInput=${(event) => setApiKey(event.target.value)} /></label>`}
          <p class="wide actions"><button class="primary" disabled=${run.status === "running"}>Send</button> <button type="button" disabled=${run.status !== "running"} onClick=${stop}>Stop</button> <span class="hint">Ctrl+Enter sends</span></p>
          ${fault && html`<p role="alert" class="wide bad">${fault}</p>`}
        </form>
      <//>
      <${Panel} title="Reply" aside=${html`<label>Colours <select value=${colors} onChange=${(event) => setColors(event.target.value)}><option value="node">node</option><option value="logprob">log-probability</option><option value="none">none</option></select></label>`}>
        <${StreamFigures} run=${run} />
        <${StreamText} run=${run} colors=${colors} />
      <//>
    </div>`;
}

/** The route and the body of a request. Throws where a field is no JSON. */
function bodyOf(mode, given) {
  const body = { model: given.model };
  for (const [name] of NUMBERS) if (given[name] !== "") body[name] = Number(given[name]);
  if (mode === "completion") {
    if (given.logprobs) body.logprobs = 0;
    return ["completions", { ...body, prompt: given.prompt }];
  }
  body.messages = [...(given.system ? [{ role: "system", content: given.system }] : []), { role: "user", content: given.prompt }];
  if (given.logprobs) body.logprobs = true;
  if (mode === "tools") body.tools = json("Tools", given.tools);
  if (mode === "schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json("Schema", given.schema) } };
  }
  return ["chat/completions", body];
}

function json(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}
