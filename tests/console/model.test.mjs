// What the console computes, without a browser: `node --test tests/console/model.test.mjs`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

// Read as text: Node takes a .js file without a package.json for CommonJS.
const source = readFileSync(new URL("../../router/console/static/model.js", import.meta.url), "utf8");
const model = await import(`data:text/javascript,${encodeURIComponent(source)}`);

const STATE = {
  seq: 1, at: 10, router: { id: "r" }, totals: { running: 1 }, store: { ok: true },
  nodes: [{ id: "p0", role: "prefill", kv_used: 1, kv_total: 4 }, { id: "d0", role: "decode", kv_used: 0, kv_total: 4 }],
  flows: [], requests: { live: [], num_live: 0, ended: [{ request_id: "a", arrived_at: 1 }] },
  events: [{ seq: 1, text: "one" }],
};

test("a delta changes only what it names", () => {
  const next = model.merged(STATE, { seq: 2, at: 11, totals: { running: 5 }, nodes: [{ id: "d0", role: "decode", kv_used: 3, kv_total: 4 }], gone: [] });
  assert.equal(next.totals.running, 5);
  assert.deepEqual(next.nodes.map((node) => [node.id, node.kv_used]), [["p0", 1], ["d0", 3]]);
  assert.equal(next.requests, STATE.requests);
  assert.equal(next.router, STATE.router);
  assert.equal(STATE.nodes[1].kv_used, 0);
});

test("nodes come and go", () => {
  const next = model.merged(STATE, { seq: 2, nodes: [{ id: "d1", role: "decode" }], gone: ["p0"] });
  assert.deepEqual(next.nodes.map((node) => node.id), ["d0", "d1"]);
});

test("ended requests and events are added once", () => {
  const delta = { requests: { live: null, num_live: 2, ended: [{ request_id: "b", arrived_at: 2 }, { request_id: "a", arrived_at: 1 }] }, events: [{ seq: 1 }, { seq: 2 }] };
  const next = model.merged(model.merged(STATE, delta), delta);
  assert.deepEqual(next.requests.ended.map((each) => each.request_id), ["b", "a"]);
  assert.equal(next.requests.num_live, 2);
  assert.deepEqual(next.requests.live, []);
  assert.deepEqual(next.events.map((event) => event.seq), [1, 2]);
});

test("lists stay bounded", () => {
  let state = STATE;
  for (let at = 0; at < 800; at++) {
    state = model.merged(state, { requests: { ended: [{ request_id: `n${at}`, arrived_at: at }] }, events: [{ seq: at + 10 }] });
  }
  assert.equal(state.events.length, model.EVENTS_KEPT);
  assert.equal(state.requests.ended.length, model.ENDED_KEPT);
  assert.equal(state.requests.ended[0].request_id, "n799");
});

test("server-sent events however they are cut", () => {
  const text = 'event: snapshot\ndata: {"a":1}\n\n: a comment\n\nevent: delta\ndata: one\ndata: two\n\ndata:x\n\n';
  for (let size = 1; size <= text.length; size++) {
    const read = model.sseReader();
    const found = [];
    for (let at = 0; at < text.length; at += size) found.push(...read(text.slice(at, at + size)));
    assert.deepEqual(found, [{ event: "snapshot", data: '{"a":1}' }, { event: "delta", data: "one\ntwo" }, { event: "message", data: "x" }]);
  }
});

test("figures stay short", () => {
  assert.deepEqual([0, 0.4167, 3, 12.34, 999.6, 4200, 12_345, 3.4e6, null].map(model.count), ["0", "0.42", "3", "12.3", "1000", "4200", "12.3k", "3.4M", "–"]);
  assert.deepEqual([0, 0.5, 42.04, 480.2, 1234, 42_000, 90_000, null].map(model.millis), ["0 ms", "0.50 ms", "42.0 ms", "480 ms", "1.23 s", "42.0 s", "1.5 min", "–"]);
  assert.deepEqual([0, 900, 4.1e6, 2.5e10].map(model.bytes), ["0 B", "900 B", "4.1 MB", "25 GB"]);
  assert.deepEqual([0, 0.054, 0.61, null].map(model.percent), ["0.0 %", "5.4 %", "61 %", "–"]);
});

const TIMELINE = {
  request_id: "chatcmpl-x", arrived_at: 100, total_ms: 100, ttft_ms: 20, output_tokens: 10,
  stages: [
    { stage: "gate", start_ms: 0, end_ms: 5, epoch: 0 },
    {
      stage: "prefill", start_ms: 5, end_ms: 20, epoch: 0, node: "p0", tokens: [0, 1],
      parts: [
        { name: "queue", node: "p0", start_ms: 5, end_ms: 9 },
        { name: "compute", node: "p0", start_ms: 9, end_ms: 20, chunks: 2 },
        { name: "fetch", node: "d0", start_ms: 10, end_ms: 19, kv_bytes: 2000, lane: "shm" },
      ],
    },
    { stage: "decode", start_ms: 20, end_ms: 50, epoch: 0, node: "d0", tokens: [1, 6] },
    { stage: "retry", start_ms: 50, end_ms: 60, epoch: 0, why: "d0 is gone" },
    { stage: "prefill", start_ms: 60, end_ms: 70, epoch: 1, node: "p0" },
    { stage: "decode", start_ms: 70, end_ms: 100, epoch: 1, node: "d1", tokens: [6, 10] },
  ],
  transfers: [{ stage: "transfer", start_ms: 8, end_ms: 20, epoch: 0, node: "d0" }],
};

test("a timeline has a track per process", () => {
  const found = model.tracks(TIMELINE);
  assert.deepEqual(found.map((track) => track.name), ["router", "p0", "d0", "d1", "KV transfer"]);
  assert.equal(found.reduce((sum, track) => sum + track.spans.length, 0), 7);
});

test("what a node told lies on the node's track, below its stage", () => {
  const told = (name) => model.tracks(TIMELINE).find((track) => track.name === name).parts.map((part) => part.name);
  assert.deepEqual([told("p0"), told("d0"), told("d1"), told("router")], [["queue", "compute"], ["fetch"], [], []]);
  const rows = model.stageRows(TIMELINE);
  assert.deepEqual(rows.slice(0, 6).map((row) => row.stage), ["gate", "prefill", "queue", "compute", "fetch", "transfer"]);
  assert.deepEqual(rows.slice(1, 5).map((row) => row.why), [undefined, "", "2 chunks", "2.0 kB over shm"]);
  assert.equal(rows.filter((row) => row.isPart).length, 3);
});

test("layers lie below their fetch, subscriptions and appends beside the stages", () => {
  const [gate, prefill, ...others] = TIMELINE.stages;
  const layers = [{ name: "layers 0-1", first: 0, last: 1, start_ms: 10, end_ms: 12, kv_bytes: 1500 }, { name: "layer 2", first: 2, last: 2, start_ms: 12, end_ms: 19, kv_bytes: 500 }];
  const parts = prefill.parts.map((part) => (part.name === "fetch" ? { ...part, layers } : part));
  const offer = [{ name: "export", node: "", start_ms: 8, end_ms: 11 }, { name: "subscribe", node: "", start_ms: 11, end_ms: 20 }];
  const told = {
    ...TIMELINE, stages: [gate, { ...prefill, parts }, ...others],
    transfers: TIMELINE.transfers.map((span) => ({ ...span, parts: offer })),
    log: { appends: 9, total_ms: 30, longest_ms: 12, longest: [{ stage: "log-append", start_ms: 30, end_ms: 42, epoch: 0 }] },
  };
  const found = model.tracks(told);
  assert.deepEqual(found.map((track) => track.name), ["router", "p0", "d0", "d1", "KV transfer", "token log"]);
  assert.deepEqual(found[4].parts.map((part) => part.name), ["export", "subscribe"]);
  const rows = model.stageRows(told);
  assert.deepEqual(rows.slice(4, 10).map((row) => row.stage), ["fetch", "layers 0-1", "layer 2", "transfer", "export", "subscribe"]);
  assert.deepEqual(rows.filter((row) => row.isLayers).map((row) => [row.node, row.why]), [["d0", "1.5 kB"], ["d0", "500 B"]]);
  assert.equal(rows.filter((row) => row.stage === "log-append").length, 1);
  assert.deepEqual([...model.byStage(told)], [...model.byStage(TIMELINE)]);
});

test("every token has its node", () => {
  const made = model.makers(TIMELINE);
  assert.deepEqual([0, 1, 5, 6, 9, 10].map((index) => model.makerOf(made, index)), ["p0", "d0", "d0", "d1", "d1", null]);
});

test("a failure names who failed, why, and who went on", () => {
  assert.deepEqual(model.failures(TIMELINE), [{ epoch: 0, node: "d0", why: "d0 is gone", next: "d1" }]);
});

test("the time of each stage", () => {
  assert.deepEqual([...model.byStage(TIMELINE)], [["gate", 5], ["prefill", 25], ["decode", 60], ["retry", 10], ["transfer", 12]]);
});

test("an axis has round steps", () => {
  assert.deepEqual(model.ticks(100, 5), [0, 20, 40, 60, 80, 100]);
  assert.deepEqual(model.ticks(8210, 8), [0, 2000, 4000, 6000, 8000]);
  assert.deepEqual(model.ticks(0, 8), [0]);
});

test("flows: width follows bytes per second", () => {
  const flows = [{ from: "p0", to: "d0", bytes_per_s: 100 }, { from: "p0", to: "d1", bytes_per_s: 50 }, { from: "p9", to: "d0", bytes_per_s: 900 }];
  const lines = model.flowLines(flows, new Map([["p0", 0]]), new Map([["d0", 0], ["d1", 1]]), 16, 60);
  assert.deepEqual(lines.map((line) => [line.from, line.to, line.width]), [[0, 0, 16], [0, 1, 8]]);
  assert.deepEqual(lines.map((line) => [line.fromShift, line.toShift]), [[-4, 0], [8, 0]]);
});

test("lines of one node lie beside each other, in the order of their other ends, within its card", () => {
  const flows = [["p1", "d0", 4], ["p0", "d0", 4], ["p0", "d1", 4]].map(([from, to, bytes_per_s]) => ({ from, to, bytes_per_s }));
  const ends = [new Map([["p0", 0], ["p1", 1]]), new Map([["d0", 0], ["d1", 1]])];
  const shifts = (room) => model.flowLines(flows, ...ends, 16, room).map((line) => [line.flow.from + line.flow.to, line.fromShift, line.toShift]);
  assert.deepEqual(shifts(60), [["p1d0", 0, 8], ["p0d0", -8, -8], ["p0d1", 8, 0]]);
  assert.deepEqual(shifts(16), [["p1d0", 0, 4], ["p0d0", -4, -4], ["p0d1", 4, 0]]);
});

test("the matrix keeps the busiest rows and columns, in order", () => {
  const flows = [["p10", "d0", 5], ["p2", "d0", 4], ["p1", "d1", 1]].map(([from, to, bytes_per_s]) => ({ from, to, bytes_per_s }));
  const found = model.matrix(flows, 2);
  assert.deepEqual([found.rows, found.columns], [["p2", "p10"], ["d0", "d1"]]);
  assert.equal(found.cell("p10", "d0").bytes_per_s, 5);
  assert.equal(found.cell("p2", "d1"), undefined);
});

const flow = (from, to, lane, bytes_per_s, faults = 0) => (
  { from, to, lane, bytes_per_s, faults, transfers_per_s: bytes_per_s ? 1 : 0, ms_p99: bytes_per_s || null });

test("a pair with two lanes: the sum of both, and the times of the busier one", () => {
  const flows = [flow("p0", "d0", "shm", 90), flow("p0", "d0", "grpc", 10)];
  for (const listed of [flows, [...flows].reverse()]) {
    const cell = model.matrix(listed, 4).cell("p0", "d0");
    assert.deepEqual([cell.bytes_per_s, cell.ms_p99, cell.lanes.map((each) => each.lane), cell.fellFrom], [100, 90, ["shm", "grpc"], []]);
    assert.equal(model.flowLines(listed, new Map([["p0", 0]]), new Map([["d0", 0]]), 16, 60).length, 1);
  }
});

test("lanes: healthy, degraded, failing, and which one carried the KV instead", () => {
  const flows = [flow("p0", "d0", "shm", 0, 3), flow("p0", "d0", "grpc", 50), flow("p1", "d0", "stream", 70, 1), flow("p1", "d1", "stream", 20)];
  const told = model.laneStates(flows).map((each) => [each.lane, each.state, each.pairs, each.bytes_per_s, each.faults, each.instead]);
  assert.deepEqual(told, [["stream", "degraded", 2, 90, 1, []], ["grpc", "healthy", 1, 50, 0, []], ["shm", "failing", 1, 0, 3, ["grpc"]]]);
  assert.deepEqual(model.laneStates([]), []);
});

test("cards: some unwell nodes, the ends of busy flows, the fullest", () => {
  const nodes = Array.from({ length: 40 }, (_, index) => ({ id: `p${index}`, state: index < 9 ? "lost" : "serving", kv_used: index, kv_total: 40 }));
  const found = model.busiest(nodes, [{ from: "p20", to: "d0", bytes_per_s: 1 }], 8).map((node) => node.id);
  assert.deepEqual(found, ["p0", "p1", "p20", "p39", "p38", "p37", "p36", "p35"]);
});

test("a node's blocks and prefixes", () => {
  assert.deepEqual(model.blockCounts([["used", 3, "a"], ["free", 2, null], ["used", 1, "b"]]), { used: 4, free: 2 });
  const rows = model.prefixRows([{ key: "root", parent: null }, { key: "a", parent: 0 }, { key: "other", parent: null }, { key: "b", parent: 1 }]);
  assert.deepEqual(rows.map((row) => [row.key, row.level]), [["root", 0], ["a", 1], ["b", 2], ["other", 0]]);
});

test("blocks coloured by state, by request, by age", () => {
  const blocks = { states: [["used", 2, "chatcmpl-a"], ["used", 3, "chatcmpl-b"], ["cached", 2, null], ["free", 1, null]], ages: [[0, 5], [4, 1], [1, 1], [0, 1]] };
  assert.deepEqual(model.blockPaint(blocks, "state").names, [...Array(5).fill("block-used"), "block-cached", "block-cached", "block-free"]);
  const owned = model.blockPaint(blocks, "request");
  assert.deepEqual(owned.names.slice(0, 6), ["node-1", "node-1", "node-0", "node-0", "node-0", "idle"]);
  assert.deepEqual(owned.legend.map(({ label, number }) => [label, number]), [["a", 2], ["b", 3], ["cached", 2], ["free", 1]]);
  const aged = model.blockPaint(blocks, "age");
  assert.deepEqual(aged.names.slice(4), ["block-used", "age-4", "age-1", "block-free"]);
  assert.deepEqual(aged.legend.map(({ label }) => label), ["used", "evicted next", "used last", "free"]);
  const many = { states: Array.from({ length: 10 }, (_, index) => ["used", 20 - index, `r-${index}`]) };
  assert.deepEqual(model.blockPaint(many, "request").legend.at(-1), { name: "faint-ink", label: "other requests", number: 23 });
});

test("pieces of a stream's chunk", () => {
  const told = (choice) => model.pieces({ choices: [choice] });
  const two = [{ token: "a", logprob: -1 }, { token: "b", logprob: -2 }];
  assert.deepEqual(told({ delta: { content: "ab" }, logprobs: { content: two } }).map((piece) => [piece.text, piece.logprob, piece.num]), [["a", -1, 1], ["b", -2, 1]]);
  assert.deepEqual(told({ delta: { content: "é" }, logprobs: { content: two } }), [{ text: "é", logprob: -1.5, part: "answer", num: 2 }]);
  assert.deepEqual(told({ text: "x", logprobs: { tokens: ["x"], token_logprobs: [null] } }), [{ text: "x", logprob: null, part: "answer", num: 1 }]);
  assert.deepEqual(told({ delta: { reasoning_content: "hm" } }), [{ text: "hm", logprob: null, part: "reasoning", num: 1 }]);
  assert.deepEqual(told({ delta: { tool_calls: [{ function: { name: "f", arguments: "{}" } }] } }), [{ text: "f{}", logprob: null, part: "call", num: 1 }]);
  assert.deepEqual(told({ delta: { role: "assistant" } }), []);
  assert.deepEqual(model.pieces({ choices: [], usage: {} }), []);
});

test("log-probabilities in five steps; times of a stream", () => {
  assert.deepEqual([0, -0.2, -0.8, -2, -9, null].map(model.sureness), [0, 1, 2, 3, 4, null]);
  assert.deepEqual(model.streamTimes(10, [30, 40, 70], 5), { ttft: 20, tpot: 10, gap: 30 });
  assert.deepEqual(model.streamTimes(10, [], 0), { ttft: null, tpot: null, gap: null });
});
