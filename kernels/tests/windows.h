// Random convolutions, each also as the product of its windows.
#pragma once

#include <algorithm>
#include <cstdio>

#include "case.h"

namespace bf16kit {

// Draws the sizes of a convolution. Some are over a sequence: of height 1.
inline Image draw_image(Random& random, int64_t& batch, int64_t most_channels) {
  Image image = {};
  for (int i = 0; i < 2; ++i) {
    const bool flat = i == 0 && random.chance(0.3);
    image.kernel[i] = flat ? 1 : random.between(1, random.one_of<int64_t>({1, 3, 3, 5}));
    image.stride[i] = flat ? 1 : random.between(1, 3);
    image.dilation[i] = random.chance(0.7) ? 1 : random.between(2, 3);
    image.pad[i] = flat ? 0 : random.between(0, random.one_of<int64_t>({1, 2, 7}));
    const int64_t window = (image.kernel[i] - 1) * image.dilation[i] + 1, after = random.between(0, 2);
    const int64_t size = flat ? 1 : random.between(1, 14);
    (i == 0 ? image.height : image.width) = size;
    const int64_t padded = std::max(window, size + image.pad[i] + after);
    (i == 0 ? image.out_height : image.out_width) = (padded - window) / image.stride[i] + 1;
  }
  image.channels = random.between(1, most_channels);
  batch = random.between(1, 3);
  return image;
}

inline std::string describe(const Image& image, int64_t batch) {
  char text[200];
  std::snprintf(text, sizeof text, "batch=%d %dx%dx%d -> %dx%d kernel=%dx%d stride=%dx%d dilation=%dx%d pad=%dx%d ", int(batch),
                int(image.height), int(image.width), int(image.channels), int(image.out_height), int(image.out_width),
                int(image.kernel[0]), int(image.kernel[1]), int(image.stride[0]), int(image.stride[1]), int(image.dilation[0]),
                int(image.dilation[1]), int(image.pad[0]), int(image.pad[1]));
  return text;
}

// Returns the element of x that tap (i, j) of output pixel `pixel` reads, or -1 if it is outside of the image.
inline int64_t element(const Image& image, int64_t pixel, int64_t i, int64_t j, int64_t c) {
  const int64_t row = pixel / image.out_width % image.out_height, one = pixel / image.out_width / image.out_height;
  const int64_t down = row * image.stride[0] - image.pad[0] + i * image.dilation[0];
  const int64_t across = pixel % image.out_width * image.stride[1] - image.pad[1] + j * image.dilation[1];
  if (down < 0 || down >= image.height || across < 0 || across >= image.width) return -1;
  return ((one * image.height + down) * image.width + across) * image.channels + c;
}

inline Exact<float> draw(Random& random, int64_t size) {
  Exact<float> values(size, random.between(0, 3));
  for (int64_t i = 0; i < size; ++i) values[i] = random.normal();
  return values;
}

// A dense convolution: x is [batch, height, width, channels], and windows.x has a row for each pixel of the output.
struct Convolution {
  Image image = {};
  int64_t batch = 0;
  Exact<float> x;
  Case windows;
};

inline Convolution draw_convolution(Random& random) {
  Convolution made;
  made.image = draw_image(random, made.batch, random.one_of<int64_t>({8, 40, 140}));
  const Image& image = made.image;
  Case& c = made.windows;
  c.rows = made.batch * image.out_height * image.out_width;
  c.k = image.kernel[0] * image.kernel[1] * image.channels;
  c.n = random.between(1, 80);
  c.activation = random.one_of(kActivations);
  c.arithmetic = random.one_of({Arithmetic::kFp32, Arithmetic::kBf16});
  made.x = draw(random, made.batch * image.height * image.width * image.channels);
  c.x = Exact<float>(c.rows * c.k, 0);
  for (int64_t i = 0; i < c.x.size(); ++i) {
    const int64_t tap = i % c.k / image.channels;
    const int64_t from = element(image, i / c.k, tap / image.kernel[1], tap % image.kernel[1], i % image.channels);
    c.x[i] = from < 0 ? 0 : made.x[from];
  }
  c.w.resize(c.k * c.n);
  for (uint16_t& value : c.w) value = narrow(random.normal());
  c.bias = draw(random, c.n);
  store_weight(c, random.between(0, 31));
  return made;
}

}  // namespace bf16kit
