// Runs on the emulated machine, without an operating system: the self-check, then the AMX path on all cases.
#include <cstddef>

#include "cases.h"
#include "gemm/path.h"

using namespace bf16kit;

namespace {

void out(uint16_t port, uint8_t value) { asm volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }

// Writes to the printer, whose paper is a file.
void emit(const void* from, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    out(0x378, static_cast<const uint8_t*>(from)[i]);
    out(0x37a, 0x0d);
    out(0x37a, 0x0c);
  }
}

}  // namespace

extern "C" {

// All that the kernel needs of a C library and of the system, which grants the permission for tiles.
void* memcpy(void* to, const void* from, size_t size) {
  void* const start = to;
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(size)::"memory");
  return start;
}
void* memset(void* to, int value, size_t size) {
  void* const start = to;
  asm volatile("rep stosb" : "+D"(to), "+c"(size) : "a"(value) : "memory");
  return start;
}
void* aligned_alloc(size_t alignment, size_t size) {
  static size_t heap = 0x8000000;
  heap = (heap + alignment - 1) / alignment * alignment + size;
  return reinterpret_cast<void*>(heap - size);
}
void free(void*) {}
long syscall(long, ...) { return 0; }
int __cxa_atexit(void (*)(void*), void*, void*) { return 0; }
void* __dso_handle;

extern void (*constructors[])(), (*constructors_end[])();

__attribute__((section(".text.entry"))) void entry() {
  out(0x37a, 0x0c);
  __builtin_cpu_init();
  for (auto* constructor = constructors; constructor != constructors_end; ++constructor) (*constructor)();
  const auto use = static_cast<uint8_t>(tile_use());
  emit(&use, 1);
  const char* cases = reinterpret_cast<const char*>(0x1000000);
  const int64_t count = *reinterpret_cast<const int64_t*>(cases);
  for (int64_t i = 0; i < count; ++i) {
    const Head& head = reinterpret_cast<const Head*>(cases + sizeof count)[i];
    const auto floats = [&](int64_t at) { return at == 0 ? nullptr : reinterpret_cast<const float*>(cases + at); };
    const Weight weight = {reinterpret_cast<const uint16_t*>(cases + head.w), head.k, head.n, static_cast<Layout>(head.layout)};
    float* y = reinterpret_cast<float*>(0x6000000);
    const Product product = {floats(head.x), head.rows, weight, floats(head.bias), static_cast<Activation>(head.activation),
                             Arithmetic::kBf16, y, static_cast<uint64_t>(i) + 1,
                             head.image.channels == 0 ? nullptr : &head.image};
    for (int64_t row = 0; row < head.rows; row += head.part) {
      kAmx.bf16(product, {row, head.rows - row < head.part ? head.rows - row : head.part, 0, weight.panels()});
    }
    emit(y, head.rows * head.n * sizeof *y);
  }
  for (const char* end = "Shutdown"; *end != 0; ++end) out(0x8900, *end);  // ends Bochs
  for (;;) asm volatile("hlt");
}
}
