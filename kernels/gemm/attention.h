// Attention: y = softmax(scale * q · kᵀ + mask) · v for each head, without a matrix of all scores.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/parts.h"

namespace bf16kit {

struct Path;
enum class Arithmetic;

// A tensor of four dimensions as it lies in memory: what its elements' addresses are apart. 0 repeats one element.
struct Strided {
  const float* data;
  int64_t batch, head, row, column;
};

// Queries of `heads` heads; heads / kv_heads neighbouring ones share the keys and values of one.
struct Attention {
  int64_t batch, heads, kv_heads;
  int64_t queries, keys;  // rows of q, and of k and v
  int64_t depth, width;   // columns of q and k, and of v
  float scale;
  Arithmetic arithmetic;
  Strided q, k, v;  // their columns are neighbours in memory
  Strided mask;     // [batch, heads, queries, keys], added to the scaled scores; its data may be null
  float* y;         // [batch, queries, heads * width]
  uint64_t id;      // of these keys and values: threads keep what they copied of them from one part to the next

  int64_t shared() const { return heads / kv_heads; }
  int64_t rows() const { return shared() * queries; }  // of q that read the same keys
};

// What one thread computes: some rows of those that read the keys of one head, in order of head and query.
struct AttentionPart {
  int64_t batch, kv_head;
  int64_t first_row, rows;
};

// Computes y (id is filled in here) with `run(threads, …)`. False when there was no memory.
bool attend(Attention& attention, const Path& path, RunParts run, void* threads);

}  // namespace bf16kit
