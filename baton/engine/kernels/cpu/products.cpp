// The kernels' C interface, one function each, called through ctypes by library.py: pointers and
// sizes as the structs of the headers say, nothing checked here, no exception leaves. Here: products
// by weights, for Python and, unit by unit, for steps.cpp. build.py compiles all three at once.
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "linear.h"
#include "quantized.h"
#include "step_integers.h"
#include "w8a8.h"

namespace baton {

void multiply_panel(const LinearArgs& a, Rows& rows, int64_t from, int64_t until, int64_t panel,
                    const bf16* next) {
#ifdef BATON_TILES
  if (tiles_take(a.inputs))
    return multiply_tiled(a, rows.tiled.of(from, until), from, until, panel, next);
#endif
  multiply_slab(a, {rows.factors.of(from, until), from, until}, panel, next);
}

void IntegerProducts::multiply_unit(const StepIntegers& by, const LinearArgs& like,
                                    IntegerRows& rows, const IntegerUnit& unit) {
  if (by.extra != nullptr) return multiply_int8_unit(rounding(by, like), rows.rounded, unit);
  const IntegerArgs args = widening(by, like);
  baton::multiply_unit({args, IntegerLayout(args), room_}, rows, unit);
}

}  // namespace baton

using baton::bf16;

extern "C" {

// Raised with every change of a struct or a signature: a stale library is not called.
int baton_kernels_version() { return 17; }

// Asks the kernel for what this process may only use once it has: AMX's tiles, for all its threads. 0,
// or an errno.
int baton_permit() {
#ifdef __AMX_TILE__
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (syscall(SYS_arch_prctl, kRequest, kTileData) != 0) return errno;
#endif
  return 0;
}

// Outputs of a panel of `baton_pack`.
int64_t baton_panel() { return baton::kPanel; }

void baton_pack(const bf16* weight, bf16* panels, int64_t outputs, int64_t inputs) {
  baton::pack(weight, panels, outputs, inputs);
}

// Products of few rows ask memory for each `lines`-th line of the next panel.
void baton_ask_every(int64_t lines) { baton::asking_step = static_cast<int>(lines); }

void baton_linear(const baton::LinearArgs* args) { baton::linear(*args); }

void baton_pack_integers(const baton::IntegerPack* args) { baton::pack_integers(*args); }

// Whether integers of 6 bits can be packed.
int32_t baton_packs_sixes() {
#ifdef BATON_SIXES
  return 1;
#else
  return 0;
#endif
}

void baton_integer_linear(const baton::IntegerArgs* args) { baton::integer_linear(*args); }

void baton_pack_w8a8(const int8_t* values, int8_t* panels, int32_t* extra, int64_t outputs,
                     int64_t inputs) {
  baton::pack_w8a8(values, panels, extra, outputs, inputs);
}

void baton_w8a8_linear(const baton::W8A8Args* args) { baton::w8a8_linear(*args); }
}
