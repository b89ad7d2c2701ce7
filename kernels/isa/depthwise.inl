// Convolutions of each channel by itself, for any instruction set, after activation.inl. gemm/image.h states the order of sums.

constexpr int kPixels = 4;  // neighbouring pixels that share the loads of w

// The taps of a window that are inside of the image: [first, end) of `kernel` taps, `dilation` apart, from `start` on.
struct Taps {
  int64_t first, end;

  Taps(int64_t start, int64_t kernel, int64_t dilation, int64_t size) {
    first = start < 0 ? (dilation - 1 - start) / dilation : 0;
    end = start >= size ? 0 : (size - 1 - start) / dilation + 1;
    if (end > kernel) end = kernel;
  }
};

// Computes kCount pixels of a row of y, all of whose windows have the taps `down` and `across` inside. `x` is the
// first of these taps of the first pixel.
template <Activation kActivation, int kCount>
void convolve_pixels(const Depthwise& depthwise, const float* x, const Taps& down, const Taps& across, float* y) {
  const Image& image = depthwise.image;
  const int64_t channels = image.channels, step = image.stride[1] * channels;
  const int64_t line = image.dilation[0] * image.width * channels, next = image.dilation[1] * channels;
  for (int64_t at = 0; at < channels; at += Simd::kLanes) {
    // The last vector may overlap the one before it, whose results it computes again.
    const int64_t c = at + Simd::kLanes <= channels ? at : channels - Simd::kLanes;
    typename Simd::reg sums[kCount];
    for (typename Simd::reg& sum : sums) sum = Simd::zero();
    for (int64_t i = down.first; i < down.end; ++i) {
      for (int64_t j = across.first; j < across.end; ++j) {
        const typename Simd::reg w = Simd::load(depthwise.w + (i * image.kernel[1] + j) * channels + c);
        const float* from = x + (i - down.first) * line + (j - across.first) * next + c;
#pragma GCC unroll 4
        for (int p = 0; p < kCount; ++p) sums[p] = Simd::fma(Simd::load(from + p * step), w, sums[p]);
      }
    }
    const typename Simd::reg bias = Simd::load(depthwise.bias + c);
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) Simd::store(y + p * channels + c, activate<kActivation>(Simd::add(sums[p], bias)));
  }
}

// Not inlined, so that the compiler cannot move arithmetic out of the rounding mode that convolve() sets.
template <Activation kActivation>
__attribute__((noinline)) void convolve_rows(const Depthwise& depthwise, int64_t first, int64_t rows) {
  const Image& image = depthwise.image;
  const int64_t channels = image.channels;
  for (int64_t row = first; row < first + rows; ++row) {
    const int64_t top = row % image.out_height * image.stride[0] - image.pad[0];
    const Taps down(top, image.kernel[0], image.dilation[0], image.height);
    const int64_t line = row / image.out_height * image.height + top + down.first * image.dilation[0];
    for (int64_t pixel = 0; pixel < image.out_width;) {
      const auto taps = [&](int64_t which) {
        return Taps(which * image.stride[1] - image.pad[1], image.kernel[1], image.dilation[1], image.width);
      };
      const int64_t left = pixel * image.stride[1] - image.pad[1];
      const Taps across = taps(pixel);
      const bool any = down.first < down.end && across.first < across.end;
      const int64_t start = line * image.width + left + across.first * image.dilation[1];
      const float* x = depthwise.x + (any ? start * channels : 0);
      float* y = depthwise.y + (row * image.out_width + pixel) * channels;
      const bool inside = across.first == 0 && across.end == image.kernel[1];
      if (inside && pixel + kPixels <= image.out_width && taps(pixel + kPixels - 1).end == image.kernel[1]) {
        convolve_pixels<kActivation, kPixels>(depthwise, x, down, across, y);
        pixel += kPixels;
      } else {
        convolve_pixels<kActivation, 1>(depthwise, x, down, across, y);
        pixel += 1;
      }
    }
  }
}

void convolve(const Depthwise& depthwise, int64_t first, int64_t rows) {
  const RoundingMode mode(Arithmetic::kFp32);
  with_constant(depthwise.activation, [&](auto activation) { convolve_rows<activation.value>(depthwise, first, rows); });
}
