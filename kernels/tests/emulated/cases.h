// A product that the emulated machine computes, at most `part` rows at a time: of an image, unless that has no channels. x, w and
// bias: where they begin, in bytes from the beginning of the cases; a bias at 0 is none. The cases are their number as int64, a
// Head for each, then the data. The machine's output is one byte, the TileUse, then y of each case.
#include "gemm/image.h"

struct Head {
  int64_t rows, k, n, layout, activation, part, x, w, bias;
  bf16kit::Image image;
};
