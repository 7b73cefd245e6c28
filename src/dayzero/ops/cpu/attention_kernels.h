// Attention of one query token over one partition of keys, the softmax of one row of scores, and one row of RMS norm.
// All in float; the query heads of a key head share every load of a key and of a value.
#pragma once
#include "vectors.h"

namespace dayzero {
namespace {

constexpr int kHeadBlock = 4;
constexpr int kScoreStride = kPartitionKeys + 16;

// dot products of H query heads with C keys -> scores[h][0:C]
template <class T, int H, int C>
inline void dots(const float* q, int64_t Dk, const void* const* k_rows, float* scores) {
  V acc[H * C];
  const T* k[C];
  for (int c = 0; c < C; c++) k[c] = (const T*)k_rows[c];
  for (int i = 0; i < H * C; i++) acc[i] = zero();
  int64_t d = 0;
  for (; d + W <= Dk; d += W) {
    V kv[C];
    for (int c = 0; c < C; c++) kv[c] = load(k[c] + d);
    for (int h = 0; h < H; h++) { V qv = load(q + h * Dk + d); for (int c = 0; c < C; c++) acc[h * C + c] = fma(qv, kv[c], acc[h * C + c]); }
  }
  if (d < Dk) {
    V kv[C];
    for (int c = 0; c < C; c++) kv[c] = load(k[c] + d, Dk - d);
    for (int h = 0; h < H; h++) { V qv = load(q + h * Dk + d, Dk - d); for (int c = 0; c < C; c++) acc[h * C + c] = fma(qv, kv[c], acc[h * C + c]); }
  }
  float sums[(H * C + 3) / 4 * 4];
  for (int i = 0; i < H * C; i += 4)
    reduce4(acc[i], i + 1 < H * C ? acc[i + 1] : zero(), i + 2 < H * C ? acc[i + 2] : zero(), i + 3 < H * C ? acc[i + 3] : zero(), sums + i);
  for (int h = 0; h < H; h++) for (int c = 0; c < C; c++) scores[h * kScoreStride + c] = sums[h * C + c];
}

// acc[h][0:N*W] = sum over keys of p[h][j] * v[j]; with `partial` the last vector holds `tail` values only
template <class T, int H, int N, bool partial>
inline void weighted(const float* p, const void* const* v_rows, int64_t num_keys, int64_t offset, int64_t tail, float* out, int64_t Dv) {
  V acc[H * N];
  for (int i = 0; i < H * N; i++) acc[i] = zero();
  for (int64_t j = 0; j < num_keys; j++) {
    auto v = (const T*)v_rows[j] + offset;
    V vv[N];
    for (int n = 0; n < N; n++) vv[n] = partial && n == N - 1 ? load(v + n * W, tail) : load(v + n * W);
    for (int h = 0; h < H; h++) { V pv = set1(p[h * kScoreStride + j]); for (int n = 0; n < N; n++) acc[h * N + n] = fma(pv, vv[n], acc[h * N + n]); }
  }
  for (int h = 0; h < H; h++) for (int n = 0; n < N; n++) {
    if (partial && n == N - 1) store(out + h * Dv + offset + n * W, acc[h * N + n], tail);
    else store(out + h * Dv + offset + n * W, acc[h * N + n]);
  }
}

// scores[0:n] -> capped scaled scores; returns their maximum. scores must be writable up to a whole number of vectors.
inline float scale_scores(float* scores, int64_t n, float scale, float softcap) {
  V high = set1(-__builtin_inff());
  int64_t whole = n / W * W, j = 0;
  for (; j < whole; j += W) {
    V s = mul(load(scores + j), set1(scale));
    if (softcap > 0) s = soft_capped(s, softcap);
    store(scores + j, s);
    high = maximum(high, s);
  }
  float result = lane_max(high);
  if (j < n) {
    V s = mul(load(scores + j, n - j), set1(scale));
    if (softcap > 0) s = soft_capped(s, softcap);
    store(scores + j, s, n - j);
    for (; j < n; j++) result = scores[j] > result ? scores[j] : result;
  }
  return result;
}

// scores[0:n] -> exp(scores - high) in place; returns their sum
inline float exponentials(float* scores, int64_t n, float high) {
  V sum = zero();
  int64_t j = 0;
  for (; j + W <= n; j += W) { V e = exponential(sub(load(scores + j), set1(high))); store(scores + j, e); sum = add(sum, e); }
  float result = lane_sum(sum);
  if (j < n) {
    store(scores + j, exponential(sub(load(scores + j, n - j), set1(high))), n - j);
    for (; j < n; j++) result += scores[j];
  }
  return result;
}

template <class T, int H> inline void attend_heads(const AttendCall& call, int64_t head) {
  constexpr int C = (W == 16 || H <= 2) ? 4 : 2;               // keys at a time: H * C accumulators must fit the registers
  constexpr int N = (W == 16 || H <= 2) ? 4 : 2;               // value vectors at a time, likewise
  alignas(64) float scores[H * kScoreStride];
  for (int64_t j = 0; j < call.num_keys; j += C) dots<T, H, C>(call.q + head * call.Dk, call.Dk, call.k_rows + j, scores + j);
  for (int h = 0; h < H; h++) {
    float* row = scores + h * kScoreStride;
    call.maximum[head + h] = scale_scores(row, call.num_keys, call.scale, call.softcap);
    call.sum[head + h] = exponentials(row, call.num_keys, call.maximum[head + h]);
  }
  float* out = call.acc + head * call.Dv;
  int64_t d = 0;
  for (; d + N * W <= call.Dv; d += N * W) weighted<T, H, N, false>(scores, call.v_rows, call.num_keys, d, 0, out, call.Dv);
  for (; d + W <= call.Dv; d += W) weighted<T, H, 1, false>(scores, call.v_rows, call.num_keys, d, 0, out, call.Dv);
  if (d < call.Dv) weighted<T, H, 1, true>(scores, call.v_rows, call.num_keys, d, call.Dv - d, out, call.Dv);
}

template <class T> void attend_all(const AttendCall& call) {
  int64_t h = 0;
  for (; h + kHeadBlock <= call.G; h += kHeadBlock) attend_heads<T, kHeadBlock>(call, h);
  if (call.G - h == 3) attend_heads<T, 3>(call, h);
  if (call.G - h == 2) attend_heads<T, 2>(call, h);
  if (call.G - h == 1) attend_heads<T, 1>(call, h);
}

void attend(const AttendCall& call) {
  if (call.type == DType::f32) attend_all<float>(call);
  else if (call.type == DType::bf16) attend_all<bf16>(call);
  else attend_all<half>(call);
}

void softmax_row(const SoftmaxRow& row) {
  float* visible = row.scores + row.low;
  int64_t n = row.high - row.low;
  float high = scale_scores(visible, n, row.scale, row.softcap);
  if (row.has_sink && row.sink > high) high = row.sink;
  float sum = exponentials(visible, n, high);
  if (row.has_sink) sum += __builtin_expf(row.sink - high);
  V inverse = set1(1.0f / sum);
  int64_t j = 0;
  for (; j + W <= n; j += W) store(visible + j, mul(load(visible + j), inverse));
  for (; j < n; j++) visible[j] *= 1.0f / sum;
  for (int64_t i = 0; i < row.low; i++) row.scores[i] = 0;
  for (int64_t i = row.high; i < row.n; i++) row.scores[i] = 0;
}

template <class T, class S> void norm(const NormRow& row) {
  auto x = (const T*)row.x; auto out = (T*)row.out; auto weight = (const S*)row.weight;
  V squares[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= row.n; i += 4 * W) for (int u = 0; u < 4; u++) { V v = load(x + i + u * W); squares[u] = fma(v, v, squares[u]); }
  float sum = lane_sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  for (; i < row.n; i++) sum += widen(x[i]) * widen(x[i]);
  float inverse = 1.0f / __builtin_sqrtf(sum / float(row.n) + row.eps);
  for (i = 0; i < row.n; i++) {
    float value = widen(x[i]) * inverse;
    // Norms without an offset round before the weight is applied; those with one work in float throughout.
    if (weight && row.weight_offset == 0) { T rounded; narrow(value, rounded); value = widen(rounded) * widen(weight[i]); }
    else if (weight) value *= row.weight_offset + widen(weight[i]);
    narrow(value, out[i]);
  }
}

template <class T> void norm_typed(const NormRow& row) {
  if (row.weight_type == DType::f32) norm<T, float>(row);
  else if (row.weight_type == DType::bf16) norm<T, bf16>(row);
  else norm<T, half>(row);
}

void norm_row(const NormRow& row) {
  if (row.type == DType::f32) norm_typed<float>(row);
  else if (row.type == DType::bf16) norm_typed<bf16>(row);
  else norm_typed<half>(row);
}

}  // namespace
}  // namespace dayzero
