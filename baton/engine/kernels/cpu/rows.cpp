// The kernels' C interface, as in products.cpp. Here: what has no weights, but for what steps.cpp
// needs itself.
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "attention_int8.h"
#include "delta_rule.h"
#include "elementwise.h"
#include "prefill.h"
#include "sampling.h"

using baton::bf16;

extern "C" {

// Binds the threads of the caller's team, which grows to one for each core: those behind the first
// `num_own` to a core of `spare` each, the others but the caller to `own`. Writes the Linux ids
// of those into `threads`. 0, or an errno.
int32_t baton_place_team(const int32_t* own, int64_t num_own, const int32_t* spare,
                         int64_t num_spare, int32_t* threads) {
  std::atomic<int32_t> refused{0};
#pragma omp parallel num_threads(num_own + num_spare)
  {
    const int64_t thread = omp_get_thread_num();
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (thread >= num_own) {
      CPU_SET(spare[thread - num_own], &cores);
      threads[thread - num_own] = static_cast<int32_t>(syscall(SYS_gettid));
    }
    for (int64_t i = 0; thread < num_own && i < num_own; ++i) CPU_SET(own[i], &cores);
    if (thread > 0 && sched_setaffinity(0, sizeof cores, &cores) != 0) refused = errno;
  }
  return refused;
}

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

void baton_store_int8(const baton::Int8StoreArgs* args) { baton::store_int8(*args); }

void baton_prefill_attention(const baton::PrefillArgs* args) { baton::prefill_attention(*args); }

void baton_delta_rule(const baton::DeltaArgs* args) { baton::delta_rule(*args); }
}
