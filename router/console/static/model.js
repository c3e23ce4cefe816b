// What the console computes: merging of deltas, server-sent events, formats, layouts. Pure: no DOM.

export const EVENTS_KEPT = 500;
export const ENDED_KEPT = 200;

// ---- snapshot and deltas ----------------------------------------------------------------------

/** The state after a delta; neither argument changes. Nodes merge by id, lists grow at their end. */
export function merged(state, delta) {
  const next = { ...state };
  for (const key of ["seq", "at", "router", "totals", "store", "flows"]) {
    if (delta[key] !== undefined && delta[key] !== null) next[key] = delta[key];
  }
  if (delta.nodes?.length || delta.gone?.length) {
    const nodes = new Map(state.nodes.map((node) => [node.id, node]));
    for (const id of delta.gone ?? []) nodes.delete(id);
    for (const node of delta.nodes ?? []) nodes.set(node.id, node);
    next.nodes = [...nodes.values()];
  }
  if (delta.requests) {
    const { live, num_live, ended } = delta.requests;
    next.requests = {
      live: live ?? state.requests.live,
      num_live: num_live ?? state.requests.num_live,
      ended: ended?.length ? withNew(state.requests.ended, ended) : state.requests.ended,
    };
  }
  if (delta.events?.length) {
    const known = new Set(state.events.map((event) => event.seq));
    const fresh = delta.events.filter((event) => !known.has(event.seq));
    next.events = [...state.events, ...fresh].slice(-EVENTS_KEPT);
  }
  return next;
}

/** The newest first, as the router tells them. */
function withNew(ended, fresh) {
  const ids = new Set(fresh.map((each) => each.request_id));
  return [...fresh, ...ended.filter((each) => !ids.has(each.request_id))].slice(0, ENDED_KEPT);
}

/** Server-sent events of a text that comes in pieces: feed(text) gives [{event, data}]. */
export function sseReader() {
  let rest = "";
  return (text) => {
    const blocks = (rest + text.replace(/\r\n?/g, "\n")).split("\n\n");
    rest = blocks.pop();
    const found = [];
    for (const block of blocks) {
      let event = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
      if (data.length) found.push({ event, data: data.join("\n") });
    }
    return found;
  };
}

// ---- formats ----------------------------------------------------------------------------------

const NONE = "–";
const isNone = (value) => value === null || value === undefined || Number.isNaN(value);

/** 0.42, 3.1, 42, 1.2k, 3.4M: at most four characters and a unit. */
export function count(value) {
  if (isNone(value)) return NONE;
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= limit) {
      const scaled = value / (unit === "k" ? 1e3 : limit);
      return `${scaled.toFixed(scaled < 100 ? 1 : 0)}${unit}`;
    }
  }
  if (Number.isInteger(value) || Math.abs(value) >= 100) return String(Math.round(value));
  return Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function millis(value) {
  if (isNone(value)) return NONE;
  if (value === 0) return "0 ms";
  if (value >= 60_000) return `${(value / 60_000).toFixed(1)} min`;
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  if (value >= 100) return `${value.toFixed(0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} ms`;
}

/** As `millis`, with fewer digits: for captions. */
export const millisShort = (value) =>
  (value >= 10 && value < 100 ? `${value.toFixed(0)} ms` : value < 10 && value > 0 ? `${value.toFixed(1)} ms` : millis(value));

export function bytes(value) {
  if (isNone(value)) return NONE;
  let scaled = value;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (scaled < 1000 || unit === "TB") {
      return `${scaled < 10 && unit !== "B" ? scaled.toFixed(1) : scaled.toFixed(0)} ${unit}`;
    }
    scaled /= 1000;
  }
  return NONE;
}

export const percent = (share) => (isNone(share) ? NONE : `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`);
export const kvShare = (node) => (node.kv_total ? node.kv_used / node.kv_total : 0);
export const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 8);

/** The part of an id that tells requests apart: without a dialect's prefix, its first characters. */
export const shortId = (id) => id.replace(/^[a-z]+-/, "").slice(0, 13);

// ---- nodes and flows --------------------------------------------------------------------------

export const isWell = (node) => node.state === "serving";

/** Nodes of one role (null: not told yet): the unwell first, else by name, numbers in their order. */
export function byRole(nodes, role) {
  const order = new Intl.Collator("en", { numeric: true });
  return nodes
    .filter((node) => node.role === role)
    .sort((a, b) => isWell(a) - isWell(b) || order.compare(a.id, b.id));
}

/** The `most` nodes that deserve a card: a few unwell ones, the ends of the busiest flows, the fullest. */
export function busiest(nodes, flows, most) {
  const known = new Map(nodes.map((node) => [node.id, node]));
  const chosen = new Set(nodes.filter((node) => !isWell(node)).slice(0, most / 4));
  for (const flow of [...flows].sort((a, b) => b.bytes_per_s - a.bytes_per_s)) {
    for (const node of [known.get(flow.from), known.get(flow.to)]) {
      if (node && chosen.size < most) chosen.add(node);
    }
  }
  for (const node of [...nodes].sort((a, b) => kvShare(b) - kvShare(a))) {
    if (chosen.size < most) chosen.add(node);
  }
  return [...chosen];
}

/** Lines between cards: `left` and `right` map node id to row. Widths are linear in bytes/s, 1 to `widest`. */
export function flowLines(flows, left, right, widest, room) {
  const shown = pairsOf(flows).filter((pair) => left.has(pair.from) && right.has(pair.to));
  const most = Math.max(1, ...shown.map((flow) => flow.bytes_per_s));
  const lines = shown.map((flow) => ({
    flow,
    from: left.get(flow.from),
    to: right.get(flow.to),
    width: Math.max(1, (widest * flow.bytes_per_s) / most),
  }));
  besideEachOther(lines, "from", "to", room);
  besideEachOther(lines, "to", "from", room);
  return lines;
}

/** Sets `fromShift` or `toShift` of lines: how far from the middle of a node's card a line meets it. Lines
 * of one node lie beside each other in the order of their other ends, within `room` pixels. */
function besideEachOther(lines, end, other, room) {
  for (const row of new Set(lines.map((line) => line[end]))) {
    const mine = lines.filter((line) => line[end] === row).sort((a, b) => a[other] - b[other]);
    const total = mine.reduce((sum, line) => sum + line.width, 0);
    const scale = Math.min(1, room / total);
    let at = (-total * scale) / 2;
    for (const line of mine) {
      line[`${end}Shift`] = at + (line.width * scale) / 2;
      at += line.width * scale;
    }
  }
}

/** The flows of each pair of nodes as one, with their sums: [{from, to, lanes, bytes_per_s, faults,
 * ms_p99, fellFrom}]. `lanes`: its flows, the busiest first; `ms_p99`: of that one. `fellFrom`: lanes
 * that failed while another one carried the KV. */
export function pairsOf(flows) {
  const found = new Map();
  for (const flow of flows) {
    const name = `${flow.from}\n${flow.to}`;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(flow);
  }
  return [...found.values()].map((each) => {
    const lanes = [...each].sort((a, b) => b.bytes_per_s - a.bytes_per_s || (a.faults ?? 0) - (b.faults ?? 0));
    const sum = (field) => lanes.reduce((total, flow) => total + (flow[field] ?? 0), 0);
    const [best] = lanes;
    return {
      from: best.from, to: best.to, lanes, bytes_per_s: sum("bytes_per_s"), faults: sum("faults"), ms_p99: best.ms_p99,
      fellFrom: lanes.slice(1).filter((flow) => flow.faults && best.bytes_per_s > flow.bytes_per_s).map((flow) => flow.lane),
    };
  });
}

/** Each lane that was used: [{lane, state, pairs, bytes_per_s, transfers_per_s, ms_p99, faults, instead}],
 * the busiest first. `state`: healthy, degraded (it had faults), failing (nothing came through).
 * `instead`: the lanes to which its pairs fell back. */
export function laneStates(flows) {
  const pairs = pairsOf(flows);
  const names = [...new Set(flows.map((flow) => flow.lane))];
  return names.map((lane) => {
    const mine = flows.filter((flow) => flow.lane === lane);
    const sum = (field) => mine.reduce((total, flow) => total + (flow[field] ?? 0), 0);
    const [moved, faults] = [sum("bytes_per_s"), sum("faults")];
    const times = mine.map((flow) => flow.ms_p99).filter((ms) => !isNone(ms));
    return {
      lane, pairs: mine.length, bytes_per_s: moved, transfers_per_s: sum("transfers_per_s"), faults,
      ms_p99: times.length ? Math.max(...times) : null,
      state: !faults ? "healthy" : sum("transfers_per_s") > 0 ? "degraded" : "failing",
      instead: [...new Set(pairs.filter((pair) => pair.fellFrom.includes(lane)).map((pair) => pair.lanes[0].lane))],
    };
  }).sort((a, b) => b.bytes_per_s - a.bytes_per_s || a.lane.localeCompare(b.lane));
}

/** Rows and columns of the transfer matrix: the busiest `most` of each side. A cell is a pair. */
export function matrix(flows, most) {
  const sums = { from: new Map(), to: new Map() };
  const pairs = pairsOf(flows);
  for (const pair of pairs) {
    for (const side of ["from", "to"]) {
      sums[side].set(pair[side], (sums[side].get(pair[side]) ?? 0) + pair.bytes_per_s);
    }
  }
  const order = new Intl.Collator("en", { numeric: true });
  const top = (sum) =>
    [...sum].sort((a, b) => b[1] - a[1]).slice(0, most).map(([id]) => id).sort(order.compare);
  const cells = new Map(pairs.map((pair) => [`${pair.from}\n${pair.to}`, pair]));
  return { rows: top(sums.from), columns: top(sums.to), cell: (from, to) => cells.get(`${from}\n${to}`) };
}

// ---- timelines --------------------------------------------------------------------------------

const TRACKS = { transfer: "KV transfer", "log-append": "token log" }; // beside the processes
const trackOf = (span) => TRACKS[span.stage] ?? (span.node || "router");

/** The stages, and what lies beside them: transfers of KV, the longest appends to the log. */
const allSpans = (timeline) => [...timeline.stages, ...timeline.transfers, ...(timeline.log?.longest ?? [])];

/** Tracks of a timeline in order of appearance: [{name, spans, parts}], the router's first, KV's
 * and the log's last. `parts`: what that node told of its stages, or what a transfer consists of. */
export function tracks(timeline) {
  const found = new Map([["router", []]]);
  for (const span of allSpans(timeline)) {
    const name = trackOf(span);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(span);
  }
  const parts = timeline.stages.flatMap((span) => span.parts ?? []);
  const listed = [...found].map(([name, spans]) => (
    { name, spans, parts: name === TRACKS.transfer ? spans.flatMap((span) => span.parts ?? []) : parts.filter((part) => part.node === name) }));
  const rank = (track) => (track.name === "router" ? 0 : 2 + Object.values(TRACKS).indexOf(track.name));
  return listed.filter((track) => track.spans.length).sort((a, b) => rank(a) - rank(b));
}

/** Rows of the table: each stage, transfer and append, below it what nodes told of it (`isPart`),
 * and below a fetch its layers (`isLayers`, too). */
export function stageRows(timeline) {
  const spans = allSpans(timeline);
  spans.sort((a, b) => a.start_ms - b.start_ms || a.end_ms - b.end_ms);
  const row = (part, epoch) => ({ ...part, stage: part.name, epoch, why: partNote(part), isPart: true });
  return spans.flatMap((span) => [
    span,
    ...(span.parts ?? []).flatMap((part) => [
      row(part, span.epoch),
      ...(part.layers ?? []).map((each) => ({ ...row(each, span.epoch), node: part.node, isLayers: true })),
    ]),
  ]);
}

/** What a part tells beside its times. */
function partNote(part) {
  if (part.kv_bytes) return part.lane ? `${bytes(part.kv_bytes)} over ${part.lane}` : bytes(part.kv_bytes);
  return part.chunks > 1 ? `${part.chunks} chunks` : "";
}

/** Round steps of an axis from 0 to `end`: about `wanted` of them. */
export function ticks(end, wanted) {
  if (!(end > 0)) return [0];
  const rough = end / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let at = 0; at <= end * 1.0001; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

/** Who made which tokens: [{node, first, last, epoch, stage}], in order. */
export function makers(timeline) {
  return timeline.stages
    .filter((span) => span.tokens && span.tokens[1] > span.tokens[0])
    .map(({ node, tokens, epoch, stage }) => ({
      node: node ?? "router", first: tokens[0], last: tokens[1], epoch, stage,
    }));
}

/** The node that made token `index`; null if the timeline does not say. */
export function makerOf(made, index) {
  return made.find((each) => each.first <= index && index < each.last)?.node ?? null;
}

/** What went wrong: [{epoch, node, why, next}]; `next`: the node that went on. */
export function failures(timeline) {
  const { stages } = timeline;
  return stages.flatMap((span, index) => {
    if (!span.why) return [];
    const goesOn = stages.slice(index + 1).filter((each) => each.stage === "decode" || each.stage === "prefill");
    const next = (goesOn.find((each) => each.stage === "decode") ?? goesOn[0])?.node ?? null;
    // The cause is noted at the retry that it brings, or at the stage that it ended.
    const before = span.node ? span : stages.slice(0, index).reverse().find((each) => each.node);
    return [{ epoch: span.epoch, node: before?.node ?? null, why: span.why, next }];
  });
}

/** Milliseconds by stage, for the comparison of two requests. */
export function byStage(timeline) {
  const sums = new Map();
  for (const span of allSpans(timeline)) {
    if (span.stage in TRACKS && span.stage !== "transfer") continue; // only the longest are told
    sums.set(span.stage, (sums.get(span.stage) ?? 0) + span.end_ms - span.start_ms);
  }
  return sums;
}

// ---- a node's blocks --------------------------------------------------------------------------

/** Blocks by state of a run-length list, as {state: count}. */
export function blockCounts(runs) {
  const sums = {};
  for (const [state, number] of runs) sums[state] = (sums[state] ?? 0) + number;
  return sums;
}

const MOST_OWNERS = 8;
const AGE_NAMES = ["", "used last", "then", "before", "evicted next"]; // of cached blocks

/** The colour of every block as the name of a custom property, and what the colours mean:
 * {names: [...], legend: [{name, label, number}]}. `by`: "state", "request" or "age". */
export function blockPaint(blocks, by) {
  const owners = new Map();
  for (const [, number, owner] of blocks.states) if (owner) owners.set(owner, (owners.get(owner) ?? 0) + number);
  const ranked = [...owners].sort((a, b) => b[1] - a[1]).map(([owner]) => owner);
  const ages = (blocks.ages ?? []).flatMap(([age, number]) => Array(number).fill(age));
  const names = [];
  const legend = new Map();
  const paint = (name, label, number) => {
    for (let each = 0; each < number; each++) names.push(name);
    if (!legend.has(label)) legend.set(label, { name, label, number: 0 });
    legend.get(label).number += number;
  };
  for (const [state, number, owner] of blocks.states) {
    const rank = by === "request" && owner ? ranked.indexOf(owner) : -1;
    if (rank >= MOST_OWNERS) paint("faint-ink", "other requests", number);
    else if (rank >= 0) paint(`node-${rank}`, shortId(owner), number);
    else if (by === "age" && state === "cached") {
      for (let each = 0; each < number; each++) {
        const age = ages[names.length] || 1;
        paint(`age-${age}`, AGE_NAMES[age], 1);
      }
    } else paint(by === "request" && state === "cached" ? "idle" : `block-${state}`, state, number);
  }
  return { names, legend: [...legend.values()] };
}

/** The prefix tree depth first: [{...prefix, index, level}]; children after their parent. */
export function prefixRows(prefixes) {
  const children = new Map();
  prefixes.forEach((prefix, index) => {
    const parent = prefix.parent ?? -1;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(index);
  });
  const rows = [];
  const pending = [...(children.get(-1) ?? [])].reverse().map((index) => [index, 0]);
  while (pending.length) {
    const [index, level] = pending.pop();
    rows.push({ ...prefixes[index], index, level });
    for (const child of [...(children.get(index) ?? [])].reverse()) pending.push([child, level + 1]);
  }
  return rows;
}

// ---- a stream in the playground ---------------------------------------------------------------

/** Pieces of one chunk of a reply: [{text, logprob|null, num}], reasoning and calls marked by `part`. */
export function pieces(chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return [];
  const delta = choice.delta ?? {};
  const listed = choice.logprobs?.content;
  const calls = (delta.tool_calls ?? []).map((call) => `${call.function?.name ? `${call.function.name}` : ""}${call.function?.arguments ?? ""}`).join("");
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  const text = choice.text ?? delta.content ?? "";
  const part = calls ? "call" : reasoning && !text ? "reasoning" : "answer";
  if (Array.isArray(listed) && listed.length && part === "answer") {
    return spread(listed.map((each) => [each.token, each.logprob]), text, part);
  }
  if (choice.logprobs?.tokens?.length) {
    const { tokens, token_logprobs } = choice.logprobs;
    return spread(tokens.map((token, index) => [token, token_logprobs?.[index]]), text, part);
  }
  const whole = calls || reasoning || text;
  const number = listed?.length ?? null;
  return whole || number ? [{ text: whole, logprob: null, part, num: number ?? 1 }] : [];
}

/** Tokens with their texts, if these make the chunk's text; else the chunk's text as one piece. */
function spread(tokens, text, part) {
  if (tokens.map(([token]) => token).join("") === text) {
    return tokens.map(([token, logprob]) => ({ text: token, logprob: logprob ?? null, part, num: 1 }));
  }
  const known = tokens.map(([, logprob]) => logprob).filter((each) => !isNone(each));
  const mean = known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
  return [{ text, logprob: mean, part, num: tokens.length }];
}

/** 0 (sure) to 4 (a guess): the class of a log-probability's colour. */
export function sureness(logprob) {
  if (isNone(logprob)) return null;
  const limits = [0.9, 0.6, 0.3, 0.1];
  const found = limits.findIndex((limit) => Math.exp(logprob) >= limit);
  return found < 0 ? limits.length : found;
}

/** Times of a stream: first token, mean between tokens, longest gap; milliseconds, null = not yet. */
export function streamTimes(began, stamps, numTokens) {
  if (!stamps.length) return { ttft: null, tpot: null, gap: null };
  const last = stamps[stamps.length - 1];
  let gap = 0;
  for (let index = 1; index < stamps.length; index++) gap = Math.max(gap, stamps[index] - stamps[index - 1]);
  return {
    ttft: stamps[0] - began,
    tpot: numTokens > 1 ? (last - stamps[0]) / (numTokens - 1) : null,
    gap: stamps.length > 1 ? gap : null,
  };
}
