// Blocks of mobile networks (inverted bottlenecks): a product that widens the pixels, a convolution of each channel by itself,
// and a product that narrows them. The wide images between them are computed in strips that fit into the second-level cache.
#pragma once

#include "gemm/parallel.h"

namespace bf16kit {

struct Block {
  Product wide;         // of all pixels of the batch; its y is set here
  Depthwise depthwise;  // its x and y are set here
  Product narrow;       // its x is set here
};

// The size of a strip's wide images, in floats: most of a second-level cache of 1 MiB.
constexpr int64_t kStrip = int64_t{768} * 1024 / sizeof(float);

// Computes the block with `run(threads, …)`, as its three operations would one after the other, bit for bit. `products` and
// `pixels` are the paths of the products and of fp32. Returns false if there was no memory.
bool convolve(const Block& block, const Path& products, const Path& pixels, RunParts run, void* threads,
              unsigned cores = available_cores(), int64_t strip = kStrip);

}  // namespace bf16kit
