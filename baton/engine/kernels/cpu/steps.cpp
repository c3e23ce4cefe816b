// The kernels' C interface, as in products.cpp. Here: whole steps and their parts that multiply by
// weights. The products themselves are compiled in products.cpp alone.
#include "attention_tasks.h"
#include "experts.h"
#include "gates.h"
#include "latent.h"
#include "layer_part.h"
#include "step.h"

extern "C" {

void baton_decode_attention(const baton::DecodeArgs* args) {
  baton::decode_attention(*args);
}

// Decode attention asks for keys and values into a core's first cache, or its second.
void baton_ask_keys_near(int64_t near) { baton::asking_near = near != 0; }

void baton_choose_experts(const baton::ChoiceArgs* args) { baton::choose_experts(*args); }

void baton_experts(const baton::ExpertsArgs* args) { baton::mix_experts(*args); }

void baton_latent_queries(const baton::LatentQueriesArgs* args) { baton::latent_queries(*args); }

void baton_latent_values(const baton::LatentValuesArgs* args) { baton::latent_values(*args); }

int32_t baton_decode_step(const baton::StepArgs* args) { return baton::decode_step(*args); }

void baton_layer_part(const baton::PartArgs* args) { baton::layer_part(*args); }
}
