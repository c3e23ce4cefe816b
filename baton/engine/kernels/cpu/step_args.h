// What a step (step.h) is told of a model, of its pool and of its rows: the structs that step.py fills.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "gates.h"
#include "latent.h"
#include "step_integers.h"

namespace baton {

// Linear attention's weights beside its products: see DeltaArgs.
struct StepDelta {
  const float *taps, *decay, *step_bias, *norm;
  float epsilon;
};

// Latent attention's weights. `query_norm` and `query_up`: of queries of a low rank, or null.
struct StepLatent {
  const bf16* query_norm;
  const StepLinear* query_up;
  LatentWeights by;
};

// A mixture's weights: of its router, panels and the bias of its choice, or null; of its experts; of
// the gate of the one that all rows share, or null.
struct StepMixture {
  const bf16* router;
  const float* bias;
  const StepLinear *gate_ups, *downs;
  const bf16* shared_gate;
};

struct StepLayer {
  // The last four may be null; those of outputs lie between a product and its sum with the residual.
  const bf16 *input_norm, *mlp_norm, *query_norm, *key_norm, *attention_output_norm,
      *mlp_output_norm;
  StepLinear qkv, output, gate_up, down;
  int64_t rotation;  // which of StepArgs' it takes
  int64_t inner;     // of `gate_up` and `down`; 0: there are none
  const StepDelta* delta;      // of a layer with linear attention: `qkv` makes its inputs
  const StepLatent* latent;    // of one with latent attention: the same
  const StepMixture* mixture;  // or null. Then `gate_up` and `down` are what all rows share
};

// cos, sin [rows, rotated / 2]; with StepArgs::by_position [positions, rotated / 2].
struct StepRotation {
  const bf16 *cos, *sin;
};

// One layer's part of the pool, strides in numbers, and how it attends: see DecodeArgs.
struct StepPool {
  void *keys, *values;
  const float* sinks;
  int64_t key_block, key_token, key_head, value_block, value_token, value_head;
  int64_t window, group;
  float scale, softcap;
  PoolScales scales;
};

// A layer's part of the states, strides of slots in numbers: see DeltaArgs.
struct StepState {
  bf16* conv;
  float* matrices;
  int64_t conv_stride, matrix_stride;
};

// Where a layer group's KV lies: slots [rows], blocks [rows, width], first [rows].
struct StepTable {
  const int64_t *slots, *blocks, *first;
  int64_t width;
};

struct StepArgs {
  const StepLayer* layers;
  const StepPool* pools;    // [layers], unused for linear attention
  const StepState* states;  // [layers], unused for heads
  const StepTable* tables;  // by layer group
  const bf16* final_norm;
  const StepLinear* head;  // null: no logits are wanted
  StepRotation rotations[2];
  const bf16* embedding;     // [embedded, hidden], whose rows `ids` [rows] are looked up; or null
  const int64_t* ids;
  const int64_t* positions;  // [rows]
  const int64_t *slots, *begins;  // [rows]: see DeltaArgs; null without linear attention
  bf16* residual;            // [rows, hidden]: embeddings, made here or not, overwritten
  bf16* out;                 // [rows, hidden]: the final norm's
  float* logits;             // [rows, vocabulary]: the head's
  bf16* scratch;  // [rows, wide + narrow + hidden], and, if heads are gated, [rows, qkv]
  bf16* expert_scratch;  // ExpertsArgs', of mixtures
  // Of latent attention: [rows, heads, nope + key + rank], and, if queries have a low rank, [rows,
  // heads, nope + rope].
  bf16* latent_scratch;
  // Numbers of a row: the most that a product makes and takes, but for those of size `hidden`; what
  // `qkv` makes, and `output` takes, where layers attend.
  int64_t wide, narrow, qkv, attended;
  int64_t vocabulary;
  int64_t num_layers, rows, hidden, inner, heads, kv_heads, dim, block_size;  // the widest inner
  int64_t rotated, neighbours, gelu, gated;  // see RotateArgs; GELU's gates; gates behind queries
  int64_t by_position;  // rotations are those of so many positions; 0: of the rows
  int64_t embedded;
  int64_t key_heads, value_heads, key_dim, value_dim, num_taps;  // of linear attention, or 0
  int64_t expert_inner;  // of mixtures, or 0
  ChoiceRule choice;     // the same
  LatentSizes latent;    // of latent attention, or 0
  NormRule norms;
};

// A part of a step between the attention of two layers (layer_part.h): from `attended` [rows, attended]
// of layer `after` on, or the first part if that is -1, to the keys and values of layer `before`, or the
// last part if that is -1. Of `step`, `residual` and `scratch` go from part to part; what `qkv` makes
// lies at the beginning of `scratch`, [rows, qkv], with queries rotated; keys and values are in the pool.
struct PartArgs {
  StepArgs step;
  int64_t after, before;
  const bf16* attended;
};

}  // namespace baton
