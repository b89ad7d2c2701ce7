// One random product: its shape, its numbers, and the same product in float64.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gemm/path.h"

namespace bf16kit {

constexpr std::initializer_list<Activation> kActivations = {Activation::kNone, Activation::kRelu, Activation::kGelu,
                                                            Activation::kGeluTanh, Activation::kSilu, Activation::kRelu6};

class Random {
 public:
  Random(uint64_t seed, uint64_t index) : engine_(seed * 0x9e3779b97f4a7c15 + index) {}
  int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  bool chance(double probability) { return std::bernoulli_distribution(probability)(engine_); }
  float normal() { return normal_(engine_); }
  template <typename T>
  T one_of(std::initializer_list<T> values) { return values.begin()[between(0, values.size() - 1)]; }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

// An array that ends exactly where its memory ends, so that AddressSanitizer detects a read of the first element beyond it. It
// begins a few elements after an aligned address: code may rely on the alignment of one element only.
template <typename T>
class Exact {
 public:
  Exact() = default;
  Exact(int64_t size, int64_t late) : size_(size), late_(late), memory_(static_cast<T*>(std::malloc(bytes()))) {
    std::memset(static_cast<void*>(memory_), 0xff, bytes());  // NaN, so that elements never written are noticed
  }
  Exact(const Exact&) = delete;
  Exact(Exact&& other) noexcept { *this = std::move(other); }
  Exact& operator=(Exact&& other) noexcept {
    std::swap(size_, other.size_);
    std::swap(late_, other.late_);
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~Exact() { std::free(memory_); }
  T* data() { return memory_ + late_; }
  const T* data() const { return memory_ + late_; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return size_; }

 private:
  size_t bytes() const { return sizeof(T) * static_cast<size_t>(size_ + late_); }

  int64_t size_ = 0, late_ = 0;
  T* memory_ = nullptr;
};

inline double widen(uint16_t stored) {
  const uint32_t bits = static_cast<uint32_t>(stored) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint16_t narrow(float value) {  // to the nearest, ties to even; not for NaN
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Converts an operand as the bf16 arithmetic does: rounded, a subnormal becomes zero.
inline float taken(float value, Arithmetic arithmetic) {
  if (arithmetic == Arithmetic::kFp32 || std::isnan(value)) return value;
  if (std::fabs(value) < std::numeric_limits<float>::min()) return std::copysign(0.0f, value);
  return static_cast<float>(widen(narrow(value)));
}

struct Case {
  int64_t rows = 0, k = 0, n = 0;
  Layout layout = Layout::kPanels;
  Activation activation = Activation::kNone;
  Arithmetic arithmetic = Arithmetic::kFp32;
  Exact<float> x;            // [rows, k]
  Exact<float> bias;         // [n], or empty
  Exact<uint16_t> stored;    // the weight as `layout` says
  std::vector<uint16_t> w;   // the weight, [k, n]

  Product product(float* y) const {
    return {x.data(), rows, {stored.data(), k, n, layout}, bias.size() == 0 ? nullptr : bias.data(), activation,
            arithmetic, y, 0};
  }

  std::string describe() const {
    static const char* const kNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu", "relu6"};
    return "rows=" + std::to_string(rows) + " k=" + std::to_string(k) + " n=" + std::to_string(n) + " layout=" +
           (layout == Layout::kPanels ? "panels" : "transposed") + " bias=" + (bias.size() == 0 ? "no" : "yes") +
           " activation=" + kNames[static_cast<int>(activation)] +
           " arithmetic=" + (arithmetic == Arithmetic::kFp32 ? "fp32" : "bf16");
  }
};

// Stores case.w in the layout case.layout.
inline void store_weight(Case& c, int64_t late) {
  c.stored = Exact<uint16_t>(c.k * c.n, late);
  for (int64_t i = 0; i < c.k; ++i) {
    for (int64_t j = 0; j < c.n; ++j) {
      const int64_t panel = j / kPanel, width = std::min(kPanel, c.n - panel * kPanel);
      const int64_t in_panels = panel * kPanel * c.k + i * width + j % kPanel;
      c.stored[c.layout == Layout::kPanels ? in_panels : j * c.k + i] = c.w[i * c.n + j];
    }
  }
}

// Mostly small sizes: incomplete panels and chains of every length are more frequent than long sums.
inline void draw_shape(Case& c, Random& random) {
  constexpr int64_t kMost = 2000000;  // multiplications
  const auto length = [&] {
    const std::initializer_list<int64_t> edges = {1, 16, 31, 32, 33, 64, 127, 128, 129, 160, 255, 256, 257, 384};
    if (random.chance(0.15)) return random.one_of(edges);
    return random.between(1, random.one_of<int64_t>({40, 40, 40, 150, 150, 300, 700}));
  };
  c.rows = random.between(1, random.one_of<int64_t>({1, 4, 14, 14, 14, 50, 50, 200}));
  c.k = length();
  c.n = length();
  if (random.chance(0.01)) {
    c.k = random.between(700, 16384);
    c.n = random.between(1, 40);
    c.rows = random.between(1, 14);
  }
  c.rows = std::max<int64_t>(1, std::min(c.rows, kMost / (c.k * c.n)));
}

// Scales of x and w: ordinary; sums that are subnormal; x subnormal itself; w subnormal itself; large.
struct Scales {
  float x, w;
};

inline Case draw(Random& random) {
  Case c;
  draw_shape(c, random);
  c.layout = random.one_of({Layout::kPanels, Layout::kPanels, Layout::kTransposed});
  c.activation = random.one_of(kActivations);
  c.arithmetic = random.one_of({Arithmetic::kFp32, Arithmetic::kBf16});
  const Scales ordinary = {1, random.chance(0.5) ? 1 : 0.05f};
  const Scales rare = random.one_of<Scales>({{1e-20f, 1e-20f}, {1e-40f, 100}, {100, 1e-39f}, {1e4f, 1e4f}});
  const Scales scales = random.chance(0.6) ? ordinary : rare;
  const bool constant = random.chance(0.03);  // rounding errors that all have the same sign
  c.x = Exact<float>(c.rows * c.k, random.between(0, 3));
  for (int64_t i = 0; i < c.x.size(); ++i) c.x[i] = constant ? 0.1f : random.normal() * scales.x;
  c.w.resize(c.k * c.n);
  for (uint16_t& value : c.w) value = narrow(constant ? 0.1f : random.normal() * scales.w);
  if (random.chance(0.2)) {
    for (int64_t i = 0; i < c.x.size(); i += random.between(1, 5)) c.x[i] = random.one_of({0.0f, -0.0f});
    for (size_t i = 0; i < c.w.size(); i += random.between(1, 5)) c.w[i] = random.one_of<uint16_t>({0, 0x8000});
  }
  if (random.chance(0.1)) {
    const float infinity = std::numeric_limits<float>::infinity();
    for (int64_t i = random.between(1, 3); i > 0; --i) {
      c.x[random.between(0, c.x.size() - 1)] = random.one_of({infinity, -infinity, std::nanf("")});
    }
    if (random.chance(0.3)) c.w[random.between(0, c.w.size() - 1)] = random.one_of<uint16_t>({0x7f80, 0xff80, 0x7fc0});
  }
  if (random.chance(0.5)) {
    c.bias = Exact<float>(c.n, random.between(0, 3));
    for (int64_t j = 0; j < c.n; ++j) c.bias[j] = random.normal() * scales.x * scales.w;
  }
  store_weight(c, random.between(0, 31));
  return c;
}

}  // namespace bf16kit
