// Rows of weights to integer codes, and the ranges that their scales come from. Bits equal torch's: division, rounding to
// even, and float32 throughout.
#pragma once
#include "vectors.h"

namespace dayzero {
namespace {

inline float lane_min(V v) {
  float t[W]; store(t, v);
  float m = t[0];
  for (int i = 1; i < W; i++) m = t[i] < m ? t[i] : m;
  return m;
}

// `tainted` becomes NaN as soon as a value is infinite or NaN, which comparisons alone would lose.
template <class T> void range_of(const T* x, int64_t n, float& low, float& high) {
  V least = set1(widen(x[0])), greatest = least, tainted = zero();
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    V v = load(x + i);
    least = minimum(least, v); greatest = maximum(greatest, v);
    tainted = add(tainted, sub(v, v));
  }
  float l = lane_min(least), g = lane_max(greatest), bad = lane_sum(tainted);
  for (; i < n; i++) {
    float v = widen(x[i]);
    l = v < l ? v : l; g = v > g ? v : g;
    bad += v - v;
  }
  low = l + bad; high = g + bad;
}

template <class T> void range_blocks(const T* x, const RangeRow& row) {
  for (int64_t b = 0, at = 0; at < row.columns; b++, at += row.width)
    range_of(x + at, row.width < row.columns - at ? row.width : row.columns - at, row.low[b], row.high[b]);
}

void range_row(const RangeRow& row) {
  if (row.type == DType::f32) range_blocks((const float*)row.x, row);
  else if (row.type == DType::bf16) range_blocks((const bf16*)row.x, row);
  else range_blocks((const half*)row.x, row);
}

template <class T> void codes_of(const T* x, const CodesRow& row) {
  float buffer[512];
  V error = zero(), weight = zero(), made = zero(), product = zero(), largest = zero();
  double sums[4] = {0, 0, 0, 0};
  for (int64_t b = 0, at = 0; at < row.columns; b++, at += row.width) {
    int64_t n = row.width < row.columns - at ? row.width : row.columns - at;
    float scale = row.scales[b], offset = row.zeros ? float(row.zeros[b]) : 0.0f;
    V s = set1(scale), z = set1(offset), lo = set1(row.least), hi = set1(row.greatest);
    for (int64_t start = 0; start < n; start += 512) {
      int64_t count = n - start < 512 ? n - start : 512;
      for (int64_t i = 0; i < count; i += W) {
        int64_t lanes = count - i;
        V v = lanes >= W ? load(x + at + start + i) : load(x + at + start + i, lanes);
        V q = minimum(maximum(round(add(divide(v, s), z)), lo), hi);
        float* out = buffer + i;
        if (lanes >= W) store(out, q); else store(out, q, lanes);
        V m = mul(sub(q, z), s), d = sub(m, v);   // beyond the row: value 0, code z, and so no error
        largest = maximum(largest, maximum(d, sub(zero(), d)));
        error = fma(d, d, error); weight = fma(v, v, weight); made = fma(m, m, made); product = fma(m, v, product);
      }
      int8_t* codes = row.codes + at + start;
      for (int64_t i = 0; i < count; i++) codes[i] = int8_t(int32_t(buffer[i]));
    }
    float four[4]; reduce4(error, weight, made, product, four);
    for (int k = 0; k < 4; k++) sums[k] += four[k];
    error = weight = made = product = zero();
  }
  for (int k = 0; k < 4; k++) row.sums[k] += sums[k];
  float most = lane_max(largest);
  if (most > row.sums[4]) row.sums[4] = most;
}

void codes_row(const CodesRow& row) {
  if (row.type == DType::f32) codes_of((const float*)row.x, row);
  else if (row.type == DType::bf16) codes_of((const bf16*)row.x, row);
  else codes_of((const half*)row.x, row);
}

// Codes of 4 or 8 bits, offset to be unsigned, low bits first; what a last word has left stays zero.
void pack_row(const int8_t* codes, int64_t n, int bits, uint32_t* words) {
  int64_t whole = n * bits / 32, i = 0;
  if (bits == 4) {
    for (int64_t w = 0; w < whole; w++) {
      uint64_t eight; std::memcpy(&eight, codes + 8 * w, 8);
      eight = (eight ^ 0x0808080808080808ull) & 0x0f0f0f0f0f0f0f0full;      // plus 8, modulo 16
      eight = (eight | (eight >> 4)) & 0x00ff00ff00ff00ffull;
      eight = (eight | (eight >> 8)) & 0x0000ffff0000ffffull;
      words[w] = uint32_t(eight | (eight >> 16));
    }
    i = whole * 8;
  } else {
    for (int64_t w = 0; w < whole; w++) {
      uint32_t four; std::memcpy(&four, codes + 4 * w, 4);
      words[w] = four ^ 0x80808080u;
    }
    i = whole * 4;
  }
  if (i < n) {
    uint32_t word = 0;
    for (int shift = 0; i < n; i++, shift += bits) word |= (uint32_t(uint8_t(codes[i] + (1 << (bits - 1)))) & ((1u << bits) - 1)) << shift;
    words[whole] = word;
  }
}

}  // namespace
}  // namespace dayzero
