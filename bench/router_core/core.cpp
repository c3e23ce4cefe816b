// The middle of a router, compiled: from a chat's token ids to the bytes of its answer.
//
// A prototype for one question (docs/adr/0014): what would a request cost if no Python stood between
// its token ids and its answer? It holds what every plain chat passes: the gate, the choice of
// nodes, the record and the log in Redis, the messages to both nodes, the handle's way from one to
// the other, the check of positions, the text of tokens, the answer's JSON, metrics and a timeline.
// It does not hold: streams, samples and beams, stop texts, tenants, retries, deaths of nodes.
//
// Python calls it once with a prompt, once with each message of a node, and once for each write to a
// node or to Redis. One thread, the event loop's.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// ---- protobuf's wire form ----

void put_varint(std::string& out, uint64_t value) {
  while (value > 0x7F) {
    out.push_back(char((value & 0x7F) | 0x80));
    value >>= 7;
  }
  out.push_back(char(value));
}

void put_number(std::string& out, int field, uint64_t value) {
  put_varint(out, uint64_t(field) << 3);
  put_varint(out, value);
}

void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_varint(out, uint64_t(field) << 3 | 2);
  put_varint(out, bytes.size());
  out.append(bytes);
}

// One message, field by field. `failed` once the bytes are no message.
struct Fields {
  const char* at;
  const char* end;
  int field = 0;
  int type = 0;
  uint64_t number = 0;
  std::string_view bytes;
  bool failed = false;

  explicit Fields(std::string_view all) : at(all.data()), end(all.data() + all.size()) {}

  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && at < end; shift += 7) {
      const uint8_t byte = uint8_t(*at++);
      value |= uint64_t(byte & 0x7F) << shift;
      if (!(byte & 0x80)) return value;
    }
    failed = true;
    return 0;
  }

  bool next() {
    if (at >= end || failed) return false;
    const uint64_t key = varint();
    field = int(key >> 3);
    type = int(key & 7);
    uint64_t size = type == 1 ? 8 : type == 5 ? 4 : 0;
    if (type == 0) {
      number = varint();
    } else {
      if (type == 2) size = varint();
      failed |= (type != 1 && type != 2 && type != 5) || size > uint64_t(end - at);
      if (failed) return false;
      bytes = std::string_view(at, size);
      at += size;
    }
    return !failed;
  }
};

// ---- Redis's wire form ----

void put_words(std::string& out, std::initializer_list<std::string_view> words) {
  out += '*' + std::to_string(words.size()) + "\r\n";
  for (std::string_view word : words) {
    out += '$' + std::to_string(word.size()) + "\r\n";
    out.append(word);
    out += "\r\n";
  }
}

// ---- a request ----

enum class Stage { prefill, decode };
enum Mark { arrived, placed, first_token, ended, num_marks };

struct Node {
  int live = 0;
  std::string batch;  // RouterBatch: what waits for the next write
};

struct Live {
  uint64_t number = 0;
  std::string id;
  std::string request;  // protobuf's bytes of the Request
  std::string text;
  size_t num_prompt = 0, num_tokens = 0;
  size_t prefill = 0, decode = 0;  // indices of nodes
  Stage stage = Stage::prefill;
  double marks[num_marks] = {};
};

struct Histogram {
  std::vector<double> bounds{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10};
  std::vector<uint64_t> counts = std::vector<uint64_t>(12);
  double sum = 0;

  void add(double value) {
    size_t at = 0;
    while (at < bounds.size() && value > bounds[at]) ++at;
    ++counts[at];
    sum += value;
  }
};

// An answer that waits until Redis has its request's records.
struct Held {
  uint64_t number;
  uint64_t command;  // the last of them, counted from 1
  std::string reply;
};

struct Timeline {
  std::string id;
  double marks[num_marks];
};

void put_json_text(std::string& out, std::string_view text) {
  for (const char each : text) {
    if (each == '"' || each == '\\') {
      out += '\\';
      out += each;
    } else if (uint8_t(each) < 0x20) {
      char code[8];
      snprintf(code, sizeof code, "\\u%04x", each);
      out += code;
    } else {
      out += each;
    }
  }
}

struct Core {
  std::vector<std::string> texts;  // of each token id
  std::string params, model, script;
  std::vector<Node> nodes[2];  // by stage
  std::string redis;
  uint64_t asked = 0, answered = 0;  // commands of Redis
  std::deque<Held> held;
  std::unordered_map<std::string, Live> live;
  std::deque<Timeline> timelines;
  size_t most_live = 4096;
  uint64_t made = 0, prompt_tokens = 0, output_tokens = 0, refused = 0;
  Histogram ttft, whole;

  void put_command(std::initializer_list<std::string_view> words) {
    if (script.empty()) return;
    put_words(redis, words);
    ++asked;
  }

  static size_t fewest(const std::vector<Node>& of) {
    size_t best = 0;
    for (size_t at = 1; at < of.size(); ++at)
      if (of[at].live < of[best].live) best = at;
    return best;
  }

  // -> number, or 0 if too many are live
  uint64_t begin(std::string_view packed_ids, size_t num_prompt, uint32_t max_tokens) {
    if (live.size() >= most_live) {
      ++refused;
      return 0;
    }
    Live it;
    it.number = ++made;
    it.marks[arrived] = now_s();
    it.id = "chatcmpl-" + std::to_string(it.number) + "-0.core";
    it.num_prompt = num_prompt;
    it.prefill = fewest(nodes[0]);
    it.decode = fewest(nodes[1]);
    it.marks[placed] = now_s();
    std::string sampling = params;
    put_number(sampling, 11, max_tokens);
    put_bytes(it.request, 1, it.id);
    put_bytes(it.request, 2, packed_ids);
    put_bytes(it.request, 3, "");  // no output yet, of one sample
    put_bytes(it.request, 4, sampling);
    put_number(it.request, 8, 600'000);
    put_number(it.request, 9, 1);
    put_bytes(it.request, 11, "fast");
    std::string submit;
    put_bytes(submit, 1, it.request);
    put_bytes(submit, 2, "");
    send(0, it.prefill, submit);
    put_command({"EVALSHA", script, "1", "{" + it.id + "}:record", "claim", it.id,
                        nodes_of(it), it.request, "3600"});
    prompt_tokens += num_prompt;
    const uint64_t number = it.number;
    live.emplace(it.id, std::move(it));
    return number;
  }

  static std::string nodes_of(const Live& it) {
    return "prefill-" + std::to_string(it.prefill) + " decode-" + std::to_string(it.decode);
  }

  void send(int stage, size_t node, std::string_view submit) {
    Node& to = nodes[stage][node];
    std::string message;
    put_bytes(message, 2, submit);
    put_bytes(to.batch, 1, message);
    ++to.live;
  }

  // A HandleReady of a prefill node.
  void on_handle(std::string_view ready) {
    std::string id;
    std::string_view handle;
    for (Fields each(ready); each.next();) {
      if (each.field == 1) id = each.bytes;
      if (each.field == 3) handle = each.bytes;
    }
    const auto found = live.find(id);
    if (found == live.end() || found->second.stage != Stage::prefill) return;
    Live& it = found->second;
    std::string task, submit;
    put_bytes(task, 1, handle);
    put_bytes(submit, 1, it.request);
    put_bytes(submit, 3, task);
    send(1, it.decode, submit);
    --nodes[0][it.prefill].live;
    it.stage = Stage::decode;
  }

  // A TokenEvent of any node. -> whether the request has ended by it
  Live* on_tokens(std::string_view event, bool& is_last) {
    std::string id;
    std::string_view packed, reason;
    uint64_t position = 0;
    for (Fields each(event); each.next();) {
      if (each.field == 1) id = each.bytes;
      if (each.field == 4) position = each.number;
      if (each.field == 5) packed = each.bytes;
      if (each.field == 7) reason = each.bytes;
    }
    const auto found = live.find(id);
    if (found == live.end()) return nullptr;
    Live& it = found->second;
    Fields ids(packed);
    std::string fresh;
    for (; ids.at < ids.end; ++position) {
      const uint64_t token = ids.varint();
      if (position < it.num_tokens) continue;  // the decode node repeats token 1
      if (position > it.num_tokens || token >= texts.size()) return nullptr;
      if (it.num_tokens++ == 0) it.marks[first_token] = now_s();
      it.text += texts[token];
      put_varint(fresh, token);
    }
    if (!fresh.empty())
      put_command({"EVALSHA", script, "1", "{" + it.id + "}:log", "append",
                          std::to_string(position), fresh});
    is_last = !reason.empty();
    return &it;
  }

  std::string finish(Live& it) {
    it.marks[ended] = now_s();
    std::string reply = "{\"id\":\"" + it.id + "\",\"object\":\"chat.completion\",\"created\":" +
                        std::to_string(time(nullptr)) + ",\"model\":\"" + model +
                        "\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
                        "\"content\":\"";
    put_json_text(reply, it.text);
    reply += "\"},\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":" +
             std::to_string(it.num_prompt) +
             ",\"completion_tokens\":" + std::to_string(it.num_tokens) +
             ",\"total_tokens\":" + std::to_string(it.num_prompt + it.num_tokens) + "}}";
    put_command({"EVALSHA", script, "1", "{" + it.id + "}:record", "finish", it.id,
                        std::to_string(it.num_tokens), "length", "60"});
    --nodes[1][it.decode].live;
    output_tokens += it.num_tokens;
    ttft.add(it.marks[first_token] - it.marks[arrived]);
    whole.add(it.marks[ended] - it.marks[arrived]);
    timelines.push_back({it.id, {}});
    memcpy(timelines.back().marks, it.marks, sizeof it.marks);
    if (timelines.size() > 2000) timelines.pop_front();
    return reply;
  }
};

// ---- Python's side ----

struct CoreObject {
  PyObject_HEAD
  Core* core;
};

bool bytes_of(PyObject* from, std::string& to) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(from, &data, &size)) return false;
  to.assign(data, size_t(size));
  return true;
}

// Core(texts: list[bytes], params: bytes, model: bytes, script: bytes, num_prefill, num_decode)
int core_init(PyObject* self, PyObject* args, PyObject*) {
  PyObject *texts, *params, *model, *script;
  int num_prefill, num_decode;
  if (!PyArg_ParseTuple(args, "O!SSSii", &PyList_Type, &texts, &params, &model, &script,
                        &num_prefill, &num_decode))
    return -1;
  Core* core = reinterpret_cast<CoreObject*>(self)->core = new Core;
  core->texts.resize(size_t(PyList_GET_SIZE(texts)));
  for (size_t at = 0; at < core->texts.size(); ++at)
    if (!bytes_of(PyList_GET_ITEM(texts, Py_ssize_t(at)), core->texts[at])) return -1;
  bytes_of(params, core->params);
  bytes_of(model, core->model);
  bytes_of(script, core->script);
  core->nodes[0].resize(size_t(num_prefill));
  core->nodes[1].resize(size_t(num_decode));
  return 0;
}

void core_dealloc(PyObject* self) {
  delete reinterpret_cast<CoreObject*>(self)->core;
  Py_TYPE(self)->tp_free(self);
}

// -> list[tuple[number, answer]] of the answers that no longer wait for Redis
PyObject* ready(Core& core) {
  PyObject* found = PyList_New(0);
  while (found != nullptr && !core.held.empty() && core.held.front().command <= core.answered) {
    const Held& it = core.held.front();
    PyObject* pair =
        Py_BuildValue("(Ky#)", it.number, it.reply.data(), Py_ssize_t(it.reply.size()));
    if (pair == nullptr || PyList_Append(found, pair)) Py_CLEAR(found);
    Py_XDECREF(pair);
    core.held.pop_front();
  }
  return found;
}

// begin(prompt_ids: list[int], max_tokens: int) -> number, or 0 if it is refused
PyObject* core_begin(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "begin(list, int)");
    return nullptr;
  }
  std::string packed;
  const Py_ssize_t size = PyList_GET_SIZE(args[0]);
  for (Py_ssize_t at = 0; at < size; ++at)
    put_varint(packed, PyLong_AsUnsignedLong(PyList_GET_ITEM(args[0], at)));
  const auto max_tokens = uint32_t(PyLong_AsUnsignedLong(args[1]));
  if (PyErr_Occurred()) return nullptr;
  Core& core = *reinterpret_cast<CoreObject*>(self)->core;
  return PyLong_FromUnsignedLongLong(core.begin(packed, size_t(size), max_tokens));
}

// take(stage: int, node: int) -> bytes for the node's stream, b"" if there are none
PyObject* core_take(PyObject* self, PyObject* const* args, Py_ssize_t) {
  const size_t stage = PyLong_AsSize_t(args[0]), node = PyLong_AsSize_t(args[1]);
  if (PyErr_Occurred()) return nullptr;
  std::string& batch = reinterpret_cast<CoreObject*>(self)->core->nodes[stage].at(node).batch;
  std::string message;
  if (!batch.empty()) put_bytes(message, 9, batch);
  batch.clear();
  return PyBytes_FromStringAndSize(message.data(), Py_ssize_t(message.size()));
}

// take_redis() -> bytes for Redis's connection, b"" if there are none
PyObject* core_take_redis(PyObject* self, PyObject*) {
  std::string& out = reinterpret_cast<CoreObject*>(self)->core->redis;
  PyObject* found = PyBytes_FromStringAndSize(out.data(), Py_ssize_t(out.size()));
  out.clear();
  return found;
}

// receive(message: bytes) -> the answers that are ready by this message of a node
PyObject* core_receive(PyObject* self, PyObject* message) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(message, &data, &size)) return nullptr;
  Core& core = *reinterpret_cast<CoreObject*>(self)->core;
  for (Fields outer(std::string_view(data, size_t(size))); outer.next();) {
    if (outer.field != 2) continue;  // the record of a node, at the start
    for (Fields step(outer.bytes); step.next();) {
      if (step.field == 2) core.on_handle(step.bytes);
      if (step.field != 1) continue;
      bool is_last = false;
      Live* it = core.on_tokens(step.bytes, is_last);
      if (it == nullptr || !is_last || it->stage != Stage::decode) continue;
      std::string reply = core.finish(*it);
      core.held.push_back({it->number, core.asked, std::move(reply)});
      core.live.erase(std::string(it->id));
    }
  }
  return ready(core);
}

// receive_redis(data: bytes) -> the answers that are ready by it. Each reply is one line here.
PyObject* core_receive_redis(PyObject* self, PyObject* received) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(received, &data, &size)) return nullptr;
  Core& core = *reinterpret_cast<CoreObject*>(self)->core;
  for (Py_ssize_t at = 0; at < size; ++at) {
    if (data[at] == '-') {
      PyErr_SetString(PyExc_RuntimeError, "Redis answered with an error");
      return nullptr;
    }
    core.answered += data[at] == '\n';
  }
  return ready(core);
}

PyMethodDef methods[] = {
    {"begin", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(core_begin)),
     METH_FASTCALL, nullptr},
    {"take", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(core_take)), METH_FASTCALL,
     nullptr},
    {"take_redis", core_take_redis, METH_NOARGS, nullptr},
    {"receive", core_receive, METH_O, nullptr},
    {"receive_redis", core_receive_redis, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyTypeObject core_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "router_core", nullptr, -1};

}  // namespace

PyMODINIT_FUNC PyInit_router_core() {
  core_type.tp_name = "router_core.Core";
  core_type.tp_basicsize = sizeof(CoreObject);
  core_type.tp_flags = Py_TPFLAGS_DEFAULT;
  core_type.tp_new = PyType_GenericNew;
  core_type.tp_init = core_init;
  core_type.tp_dealloc = core_dealloc;
  core_type.tp_methods = methods;
  if (PyType_Ready(&core_type)) return nullptr;
  PyObject* made = PyModule_Create(&module);
  if (made != nullptr) PyModule_AddObjectRef(made, "Core", reinterpret_cast<PyObject*>(&core_type));
  return made;
}
