// The operators bf16kit::Attention_… and AttentionBf16_…: y = softmax(scale * q · kᵀ + mask) · v for each head.
// Attention_… is in fp32. In AttentionBf16_…, q, k, v and softmax's numerators e^x are rounded to bf16 before multiplication.
//
//   inputs      q [batch, queries, heads * depth] in rows, or [batch, heads, queries, depth] in heads; k and v
//               likewise, with keys and kv_heads, and v with its own width instead of depth; the mask, which
//               broadcasts to [batch, heads, queries, keys]
//   output      y [batch, queries, heads * width]
//   attributes  heads, kv_heads  int, the heads of q, and of k and v; heads is a multiple of kv_heads
//               scale            float
//
// The name is Attention[Bf16]_QKV[_grouped][_mask]. Each of Q, K and V is an r if that input is in rows, an h if it is in heads.
#pragma once

#include <cstddef>

#include "ort/abi.h"

namespace bf16kit {

constexpr size_t kAttentionOperators = 8 * 2 * 2 * 2;

// Returns operator `index`, which lives as long as the program.
const abi::CustomOp* attention_operator_at(size_t index);

}  // namespace bf16kit
