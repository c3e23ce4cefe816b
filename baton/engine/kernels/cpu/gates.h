// Which experts of a mixture rows choose, and the weights of what these say.
//
//   softmax   the experts of the greatest logits, weighted by the softmax over all experts, or
//             (`normalized`) over the chosen ones
//   sigmoid   those of the greatest scores plus bias; a score is the sigmoid of a logit, and the
//             weight, (`normalized`) divided by the sum of the chosen ones
//
// With groups a row chooses from its best ones alone. A group is as good as its greatest score; of
// sigmoids as the sum of its two greatest, with their biases. Of equals the first goes first.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "elementwise.h"
#include "vectors.h"

namespace baton {

struct ChoiceRule {
  int64_t experts, per_token;
  int64_t groups, kept;  // equal parts of the experts; those that a row chooses from
  int64_t sigmoid, normalized;
  int64_t rounded;  // logits are rounded to bfloat16 first
  float scaling;    // of the weights
};

struct ChoiceArgs {
  const float* logits;  // [rows, experts]
  const float* bias;    // [experts], or null
  bf16* weights;        // [rows, per_token], the best first
  int64_t* chosen;      // [rows, per_token]
  int64_t rows;
  ChoiceRule rule;
};

// A row's logits as the rule takes them, to `to`, which has room for whole vectors.
inline void take_logits(const ChoiceRule& rule, const float* logits, float* to) {
  for (int64_t i = 0; i < rule.experts; i += 16) {
    Floats each = load(logits + i, lanes_of(rule.experts - i));
    bf16 narrow[16];
    if (rule.rounded) {
      store_rounded(narrow, each);
      each = load_wide(narrow);
    }
    store(to + i, each);
  }
}

// The `count` greatest of those scores that are not taken, the greatest first: they are now. Of NaN
// the first ones.
inline void take_greatest(const float* scores, std::vector<char>& taken, int64_t count,
                          int64_t* greatest) {
  const int64_t size = static_cast<int64_t>(taken.size());
  for (int64_t k = 0; k < count; ++k) {
    int64_t best = -1;
    for (int64_t i = 0; i < size; ++i)
      if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
    taken[best] = 1;
    greatest[k] = best;
  }
}

// Takes the experts outside the best groups.
inline void take_others(const ChoiceRule& rule, const float* scores, std::vector<char>& taken) {
  const int64_t size = rule.experts / rule.groups;
  std::vector<float> worth(rule.groups);
  for (int64_t group = 0; group < rule.groups; ++group) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) {
      second = std::max(second, std::min(first, scores[i]));
      first = std::max(first, scores[i]);
    }
    worth[group] = rule.sigmoid ? first + second : first;
  }
  std::vector<char> kept(rule.groups);
  std::vector<int64_t> best(rule.kept);
  take_greatest(worth.data(), kept, rule.kept, best.data());
  for (int64_t i = 0; i < rule.experts; ++i) taken[i] = !kept[i / size];
}

inline void choose_of_row(const ChoiceArgs& a, int64_t row) {
  const ChoiceRule& rule = a.rule;
  const int64_t room = (rule.experts + 15) / 16 * 16;
  std::vector<float> scores(room), wanted(room);
  take_logits(rule, a.logits + row * rule.experts, scores.data());
  const Floats one = broadcast(1.0f), zero = broadcast(0.0f);
  for (int64_t i = 0; i < rule.experts; i += 16) {
    Floats each = load(scores.data() + i);
    if (rule.sigmoid) each = one / (one + exponential(zero - each));
    store(scores.data() + i, each);
    if (a.bias != nullptr) each = each + load(a.bias + i, lanes_of(rule.experts - i));
    store(wanted.data() + i, each);
  }
  std::vector<char> taken(rule.experts);
  if (rule.groups > 1) take_others(rule, wanted.data(), taken);
  int64_t* chosen = a.chosen + row * rule.per_token;
  take_greatest(wanted.data(), taken, rule.per_token, chosen);

  float sum = rule.sigmoid ? 1e-20f : 0.0f;  // that of no score may be 0
  const float most = scores[chosen[0]];  // of a softmax the greatest of all
  const auto worth = [&](int64_t expert) {
    return rule.sigmoid ? scores[expert] : std::exp(scores[expert] - most);
  };
  if (rule.normalized)
    for (int64_t k = 0; k < rule.per_token; ++k) sum += worth(chosen[k]);
  else if (rule.sigmoid)
    sum = 1.0f;
  else
    for (int64_t i = 0; i < rule.experts; ++i) sum += worth(i);
  for (int64_t k = 0; k < rule.per_token; ++k)
    store_rounded(a.weights + row * rule.per_token + k,
                  broadcast(worth(chosen[k]) / sum * rule.scaling), lanes_of(1));
}

inline void choose_experts(const ChoiceArgs& a) {
#pragma omp parallel for if (a.rows * a.rule.experts > kFewNumbers)
  for (int64_t row = 0; row < a.rows; ++row) choose_of_row(a, row);
}

}  // namespace baton
