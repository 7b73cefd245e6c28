// bf16 rows times bf16 weights on AMX tiles. The product is computed transposed: a weight tile of 16 columns x 32 K is
// loaded as it lies in memory, and the few rows are packed once as pairs [K/32][16 pairs][16 rows], so weights are streamed
// once for 16 rows. Every element is accumulated over K in order, whatever the number of rows.
#pragma once
#include "linear_kernels.h"

namespace dayzero {
namespace {

constexpr int kTileK = 32;
inline int64_t num_tiles(int64_t n, int64_t size) { return (n + size - 1) / size; }

size_t amx_pack_bytes(const LinearCall& call) {
  if (!both_bf16(call)) return linear_pack_bytes(call);
  return num_tiles(call.M, 16) * num_tiles(call.K, kTileK) * 1024;
}

void amx_pack(const LinearCall& call, void* packed) {
  if (!both_bf16(call)) return linear_pack(call, packed);
  int64_t steps = num_tiles(call.K, kTileK), full = call.K / 2;
  auto out = (uint32_t*)packed;
  for (int64_t tile = 0; tile < num_tiles(call.M, 16); tile++, out += steps * 256) {
    int64_t rows = call.M - tile * 16 < 16 ? call.M - tile * 16 : 16;
    std::memset(out, 0, steps * 1024);
    for (int64_t r = 0; r < rows; r++) {
      auto x = (const bf16*)call.x + (tile * 16 + r) * call.x_stride;
      for (int64_t pair = 0; pair < full; pair++) std::memcpy(out + pair * 16 + r, x + 2 * pair, 4);
      if (call.K % 2) std::memcpy(out + full * 16 + r, x + call.K - 1, 2);
    }
  }
}

struct alignas(64) TileConfig { uint8_t palette = 1, start_row = 0, reserved[14] = {}; uint16_t bytes_per_row[16] = {}; uint8_t rows[16] = {}; };

// Up to 16 weight rows x up to 32 K, zero-padded: for the tail of K, and for fewer than 16 columns in all.
inline void copy_tile(const LinearCall& call, int64_t column, int64_t k, bf16* out) {
  int64_t n = call.K - k < kTileK ? call.K - k : kTileK;
  std::memset(out, 0, 1024);
  for (int64_t r = 0; r < 16 && column + r < call.N; r++) std::memcpy(out + r * kTileK, (const bf16*)call.w + (column + r) * call.w_stride + k, n * 2);
}

// Tiles: 0-3 sums, 4-6 weights, 7 rows. T weight tiles starting at `column` against one tile of 16 rows -> sums[T][16][16].
template <int T> inline void tiles(const LinearCall& call, const uint32_t* x, int64_t column, float* sums) {
  auto w = (const bf16*)call.w + column * call.w_stride;
  int64_t stride_bytes = call.w_stride * 2, k = 0;
  bool whole = column + 16 * T <= call.N;
  _tile_zero(0);
  if (T > 1) _tile_zero(1);
  if (T > 2) _tile_zero(2);
  if (T > 3) _tile_zero(3);
  if (whole) for (; k + kTileK <= call.K; k += kTileK, x += 256) {
    _tile_loadd(7, x, 64);
    // The next tiles' weights in the order they lie in memory: tile rows themselves are too far apart for the hardware.
    for (int line = 0; line < 16 * T; line++) __builtin_prefetch(w + 16 * T * call.w_stride + 16 * T * k + line * 32);
    _tile_loadd(4, w + k, stride_bytes); _tile_dpbf16ps(0, 4, 7);
    if (T > 1) { _tile_loadd(5, w + 16 * call.w_stride + k, stride_bytes); _tile_dpbf16ps(1, 5, 7); }
    if (T > 2) { _tile_loadd(6, w + 32 * call.w_stride + k, stride_bytes); _tile_dpbf16ps(2, 6, 7); }
    if (T > 3) { _tile_loadd(4, w + 48 * call.w_stride + k, stride_bytes); _tile_dpbf16ps(3, 4, 7); }
  }
  alignas(64) bf16 copy[16 * kTileK];
  for (; k < call.K; k += kTileK, x += 256) {
    _tile_loadd(7, x, 64);
    copy_tile(call, column, k, copy); _tile_loadd(4, copy, 64); _tile_dpbf16ps(0, 4, 7);
    if (T > 1) { copy_tile(call, column + 16, k, copy); _tile_loadd(4, copy, 64); _tile_dpbf16ps(1, 4, 7); }
    if (T > 2) { copy_tile(call, column + 32, k, copy); _tile_loadd(4, copy, 64); _tile_dpbf16ps(2, 4, 7); }
    if (T > 3) { copy_tile(call, column + 48, k, copy); _tile_loadd(4, copy, 64); _tile_dpbf16ps(3, 4, 7); }
  }
  _tile_stored(0, sums, 64);
  if (T > 1) _tile_stored(1, sums + 256, 64);
  if (T > 2) _tile_stored(2, sums + 512, 64);
  if (T > 3) _tile_stored(3, sums + 768, 64);
}

void amx_columns(const LinearCall& call, const void* packed, int64_t begin, int64_t end) {
  if (!both_bf16(call)) return linear_columns(call, packed, begin, end);
  TileConfig config;
  for (int t = 0; t < 8; t++) config.bytes_per_row[t] = 64, config.rows[t] = 16;
  _tile_loadconfig(&config);
  alignas(64) float sums[4 * 256], tile[kRowBlock * kChunk];
  int64_t row_tile_words = num_tiles(call.K, kTileK) * 256;
  for (int64_t n = begin; n < end; ) {
    int64_t whole_tiles = (end - n) / 16, width = whole_tiles >= 4 ? 64 : whole_tiles >= 1 ? 16 * whole_tiles : end - n;
    int64_t start = whole_tiles || call.N < 16 ? n : call.N - 16;   // the last, partial tile overlaps its predecessor
    for (int64_t m = 0; m < call.M; m += 16) {
      int64_t rows = call.M - m < 16 ? call.M - m : 16;
      auto x = (const uint32_t*)packed + m / 16 * row_tile_words;
      if (width > 48) tiles<4>(call, x, start, sums);
      else if (width > 32) tiles<3>(call, x, start, sums);
      else if (width > 16) tiles<2>(call, x, start, sums);
      else tiles<1>(call, x, start, sums);
      for (int64_t r = 0; r < rows; r++) for (int64_t c = 0; c < width; c++) tile[r * kChunk + c] = sums[(n - start + c) * 16 + r];
      finish(call, tile, m, rows, n, width);
    }
    n += width;
  }
  _tile_release();
}

}  // namespace
}  // namespace dayzero
