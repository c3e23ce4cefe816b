// The kernels' C interface, as in products.cpp. Here: what has no weights, but for what steps.cpp
// needs itself.
#include "attention_int8.h"
#include "attention_tasks.h"
#include "delta_rule.h"
#include "elementwise.h"
#include "prefill.h"
#include "sampling.h"

using baton::bf16;

extern "C" {

void baton_add_norm(bf16* residual, const bf16* delta, const bf16* weight, bf16* y, int64_t rows,
                    int64_t size, float epsilon, float offset) {
  baton::add_norm(residual, delta, weight, y, rows, size, {epsilon, offset});
}

void baton_rotate(const baton::RotateArgs* args) { baton::rotate(*args); }

void baton_gated(const bf16* gate_up, bf16* y, int64_t rows, int64_t size, int64_t gelu) {
  (gelu ? baton::gated<true> : baton::gated<false>)(gate_up, y, rows, size);
}

void baton_gate_heads(const baton::GateHeadsArgs* args) { baton::gate_heads(*args); }

void baton_highest(const baton::HighestArgs* args) { baton::highest(*args); }

void baton_top(const baton::TopArgs* args) { baton::top(*args); }

void baton_race(const baton::RaceArgs* args) { baton::race(*args); }

void baton_store_rows(const baton::StoreArgs* args) { baton::store_rows(*args); }

void baton_decode_attention_int8(const baton::Int8DecodeArgs* args) {
  baton::decode_attention(baton::Int8Pool{*args, args->base});
}

void baton_store_int8(const baton::Int8StoreArgs* args) { baton::store_int8(*args); }

void baton_prefill_attention(const baton::PrefillArgs* args) { baton::prefill_attention(*args); }

void baton_delta_rule(const baton::DeltaArgs* args) { baton::delta_rule(*args); }
}
