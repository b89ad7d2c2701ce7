// The operators bf16kit::Attention_… and AttentionBf16_…: y = softmax(scale * q · kᵀ + mask) · v for each head, all in fp32;
// in the latter, q, k, v and the e^x that softmax divides by their sum are rounded to bf16 before they are multiplied.
//
//   inputs      q [batch, queries, heads * depth] in rows, or [batch, heads, queries, depth] in heads; k and v
//               likewise, of keys and kv_heads, v as wide as it likes; the mask, which broadcasts to
//               [batch, heads, queries, keys]
//   output      y [batch, queries, heads * width]
//   attributes  heads, kv_heads  int, of q, and of k and v: heads is a multiple of kv_heads
//               scale            float
//
// Attention[Bf16]_QKV[_grouped][_mask], each of Q, K and V an r where that input comes in rows, an h where it comes in heads.
#pragma once

#include <cstddef>

#include "ort/abi.h"

namespace bf16kit {

constexpr size_t kAttentionOperators = 8 * 2 * 2 * 2;

// Operator `index`, which lives as long as the program.
const abi::CustomOp* attention_operator_at(size_t index);

}  // namespace bf16kit
