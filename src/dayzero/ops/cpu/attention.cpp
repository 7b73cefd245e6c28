// dayzero::paged_attention: stores the step's keys and values in the layer's pool, then attends. Decoding rows walk the
// pool in place, in partitions fixed by position; prefill chunks gather what they see and use library calls of their own.
#include <cmath>
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>
#include "state.h"

namespace dayzero {
namespace {

// Queries per matmul in a prefill chunk: scores of 128 queries x 4096 keys x 9 heads are 18 MiB of float.
constexpr int64_t kQueryBlock = 128;
// Queries per masked call of the fused kernel: fewer waste less on keys beyond the diagonal, more fill its blocks.
constexpr int64_t kMaskedQueries = 512;
// Key elements per thread below which starting it costs more than it brings.
constexpr int64_t kGrainElements = 32 * 1024;

struct Attention {
  const at::Tensor &q, &k, &v;           // [1, H, T, Dk], [1, Hkv, T, Dk], [1, Hkv, T, Dv]
  const Pool& pool;
  const Step& step;
  const float* sinks;                    // [H] or null
  float scale, softcap;
  at::Tensor out;                        // [1, T, H, Dv]
  int64_t H, Hkv, G, Dk, Dv;
  DType q_type;

  template <class F> void for_blocks(int64_t sequence, int64_t low, int64_t high, const F& f) const {   // f(position, count, block, slot)
    for (int64_t p = low; p < high; ) {
      int64_t slot = p % pool.block_size, count = std::min(pool.block_size - slot, high - p);
      f(p, count, int64_t(step.tables[sequence * step.max_blocks + p / pool.block_size]), slot);
      p += count;
    }
  }
  const char* k_at(int64_t block, int64_t slot, int64_t head) const { return (const char*)pool.k.const_data_ptr() + (block * pool.k.stride(0) + slot * pool.k.stride(1) + head * pool.k.stride(2)) * pool.k.element_size(); }
  const char* v_at(int64_t block, int64_t slot, int64_t head) const { return (const char*)pool.v.const_data_ptr() + (block * pool.v.stride(0) + slot * pool.v.stride(1) + head * pool.v.stride(2)) * pool.v.element_size(); }
  const char* q_at(int64_t head, int64_t token) const { return (const char*)q.const_data_ptr() + (head * q.stride(1) + token * q.stride(2)) * q.element_size(); }
  char* out_at(int64_t token, int64_t head) const { return (char*)out.data_ptr() + (token * H + head) * Dv * out.element_size(); }

  void store_new() const;
  void attend_rows() const;
  void attend_chunk(int64_t sequence) const;
  bool library_can() const;
  void attend_chunk_library(int64_t sequence) const;
};

void Attention::store_new() const {
  int64_t size = pool.k.element_size();
  at::parallel_for(0, step.num_sequences, std::max<int64_t>(1, step.num_sequences * kGrainElements / std::max<int64_t>(1, step.num_tokens * Hkv * Dk)), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; s++)
      for_blocks(s, step.first_position(s), step.context[s], [&](int64_t p, int64_t count, int64_t block, int64_t slot) {
        for (int64_t i = 0; i < count; i++) {
          int64_t token = step.offsets[s] + p + i - step.first_position(s);
          for (int64_t h = 0; h < Hkv; h++) {
            std::memcpy(const_cast<char*>(k_at(block, slot + i, h)), (const char*)k.const_data_ptr() + (h * k.stride(1) + token * k.stride(2)) * size, Dk * size);
            std::memcpy(const_cast<char*>(v_at(block, slot + i, h)), (const char*)v.const_data_ptr() + (h * v.stride(1) + token * v.stride(2)) * size, Dv * size);
          }
        }
      });
  });
}

void Attention::attend_rows() const {
  const KernelTable& table = kernels();
  int64_t num_rows = step.rows.size();
  if (!num_rows) return;
  // One item per (row, partition, key head). first[r] counts the partitions before row r.
  std::vector<int64_t> first(num_rows + 1, 0);
  int64_t num_keys = 0;
  for (int64_t r = 0; r < num_rows; r++) {
    int64_t position = step.rows[r].position, low = first_visible(pool, position);
    first[r + 1] = first[r] + position / kPartitionKeys - low / kPartitionKeys + 1;
    num_keys += position - low + 1;
  }
  int64_t num_items = first[num_rows] * Hkv, stride = G * (Dv + 2);       // per item: maximum [G], sum [G], acc [G, Dv]
  auto partial = (float*)scratch(kScratchPartial, num_items * stride * sizeof(float));
  int64_t item_elements = std::max<int64_t>(1, num_keys * Hkv * (Dk + Dv) * (1 + G / 4) / num_items);
  at::parallel_for(0, num_items, std::max<int64_t>(1, kGrainElements / item_elements), [&](int64_t begin, int64_t end) {
    auto query = (float*)scratch(kScratchQuery, G * Dk * sizeof(float));
    auto k_rows = (const void**)scratch(kScratchPointers, 2 * (kPartitionKeys + 4) * sizeof(void*)), v_rows = k_rows + kPartitionKeys + 4;
    int64_t r = std::upper_bound(first.begin(), first.end(), begin / Hkv) - first.begin() - 1;
    for (int64_t item = begin; item < end; item++) {
      int64_t part = item / Hkv, head = item % Hkv;
      while (part >= first[r + 1]) r++;
      const QueryRow& row = step.rows[r];
      int64_t low = first_visible(pool, row.position), index = low / kPartitionKeys + part - first[r];
      int64_t from = std::max(low, index * kPartitionKeys), to = std::min(row.position + 1, (index + 1) * kPartitionKeys), n = 0;
      for_blocks(row.sequence, from, to, [&](int64_t, int64_t count, int64_t block, int64_t slot) {
        const char *kp = k_at(block, slot, head), *vp = v_at(block, slot, head);
        for (int64_t i = 0; i < count; i++, n++) k_rows[n] = kp + i * pool.k.stride(1) * pool.k.element_size(), v_rows[n] = vp + i * pool.v.stride(1) * pool.v.element_size();
      });
      for (int64_t i = 0; i < 3; i++) k_rows[n + i] = k_rows[n - 1];
      for (int64_t g = 0; g < G; g++) table.to_f32(q_at(head * G + g, row.token), q_type, query + g * Dk, Dk);
      float* result = partial + item * stride;
      table.attend({query, G, Dk, Dv, k_rows, v_rows, n, pool.type, scale, softcap, result, result + G, result + 2 * G});
    }
  });
  at::parallel_for(0, num_rows * H, std::max<int64_t>(1, kGrainElements / Dv), [&](int64_t begin, int64_t end) {
    auto total = (float*)scratch(kScratchOut, Dv * sizeof(float));
    for (int64_t i = begin; i < end; i++) {
      int64_t r = i / H, head = i % H, g = head % G;
      auto result = [&](int64_t part) { return partial + (part * Hkv + head / G) * stride; };
      float high = sinks ? sinks[head] : -INFINITY, sum = 0;
      for (int64_t part = first[r]; part < first[r + 1]; part++) high = std::max(high, result(part)[g]);
      if (sinks) sum = std::exp(sinks[head] - high);
      std::fill(total, total + Dv, 0.0f);
      for (int64_t part = first[r]; part < first[r + 1]; part++) {
        float weight = std::exp(result(part)[g] - high);
        const float* acc = result(part) + 2 * G + g * Dv;
        sum += weight * result(part)[G + g];
        for (int64_t d = 0; d < Dv; d++) total[d] += weight * acc[d];
      }
      float inverse = 1.0f / sum;
      for (int64_t d = 0; d < Dv; d++) total[d] *= inverse;
      table.from_f32(total, out_at(step.rows[r].token, head), q_type, Dv);
    }
  });
}

// PyTorch's fused kernel: twice as fast as float32 matmuls where bf16 multiplies in hardware, but it knows no softcap, no
// sinks and one head dimension.
bool Attention::library_can() const {
  return softcap == 0 && !sinks && Dk == Dv && q.scalar_type() == at::kBFloat16 && pool.type == DType::bf16 && kernels().hardware_bf16;
}

void Attention::attend_chunk_library(int64_t sequence) const {
  int64_t begin = step.offsets[sequence], n = step.length(sequence), start = step.first_position(sequence), context = step.context[sequence], low = first_visible(pool, start), seen = context - low;
  auto query = q.narrow(2, begin, n), keys = k.narrow(2, begin, n), values = v.narrow(2, begin, n);
  auto fused = [&](int64_t b, const at::Tensor& qs, const at::Tensor& ks, const at::Tensor& vs, const std::optional<at::Tensor>& mask) {
    auto result = at::scaled_dot_product_attention(qs, ks, vs, mask, 0.0, /*is_causal=*/!mask, double(scale), /*enable_gqa=*/G > 1);
    out.narrow(1, begin + b, qs.size(2)).copy_(result.transpose(1, 2));
  };
  if (start == 0 && first_visible(pool, context - 1) == 0) return fused(0, query, keys, values, std::nullopt);
  if (start > 0) {                                             // what earlier steps stored
    keys = at::empty({1, Hkv, seen, Dk}, k.options()); values = at::empty({1, Hkv, seen, Dv}, v.options());
    int64_t size = k.element_size();
    auto key_data = (char*)keys.data_ptr(), value_data = (char*)values.data_ptr();
    for (int64_t h = 0; h < Hkv; h++)
      for_blocks(sequence, low, context, [&](int64_t p, int64_t count, int64_t block, int64_t slot) {
        for (int64_t i = 0; i < count; i++) {
          std::memcpy(key_data + (h * seen + p + i - low) * Dk * size, k_at(block, slot + i, h), Dk * size);
          std::memcpy(value_data + (h * seen + p + i - low) * Dv * size, v_at(block, slot + i, h), Dv * size);
        }
      });
  }
  for (int64_t b = 0; b < n; b += kMaskedQueries) {
    int64_t count = std::min(kMaskedQueries, n - b), block_low = first_visible(pool, start + b), block_keys = start + b + count - block_low;
    auto mask = at::zeros({count, block_keys}, out.options().dtype(at::kBool));
    bool* visible = mask.data_ptr<bool>();
    for (int64_t i = 0; i < count; i++) std::fill(visible + i * block_keys + first_visible(pool, start + b + i) - block_low, visible + i * block_keys + start + b + i + 1 - block_low, true);
    fused(b, query.narrow(2, b, count), keys.narrow(2, block_low - low, block_keys), values.narrow(2, block_low - low, block_keys), mask);
  }
}

// float32 scores of a block of queries, masked and normalised row by row, times values.
void Attention::attend_chunk(int64_t sequence) const {
  const KernelTable& table = kernels();
  int64_t begin = step.offsets[sequence], n = step.length(sequence), start = step.first_position(sequence), low = first_visible(pool, start), seen = step.context[sequence] - low;
  auto options = out.options().dtype(at::kFloat);
  auto keys = at::empty({Hkv, seen, Dk}, options), values = at::empty({Hkv, seen, Dv}, options);
  float *key_data = keys.data_ptr<float>(), *value_data = values.data_ptr<float>();
  at::parallel_for(0, Hkv, 1, [&](int64_t head_begin, int64_t head_end) {
    for (int64_t h = head_begin; h < head_end; h++)
      for_blocks(sequence, low, step.context[sequence], [&](int64_t p, int64_t count, int64_t block, int64_t slot) {
        for (int64_t i = 0; i < count; i++) {
          table.to_f32(k_at(block, slot + i, h), pool.type, key_data + (h * seen + p + i - low) * Dk, Dk);
          table.to_f32(v_at(block, slot + i, h), pool.type, value_data + (h * seen + p + i - low) * Dv, Dv);
        }
      });
  });
  for (int64_t b = 0; b < n; b += kQueryBlock) {
    int64_t count = std::min(kQueryBlock, n - b), block_low = first_visible(pool, start + b), block_keys = start + b + count - block_low;
    auto query = at::empty({Hkv, G * count, Dk}, options);
    float* query_data = query.data_ptr<float>();
    at::parallel_for(0, H * count, std::max<int64_t>(1, kGrainElements / Dk), [&](int64_t row_begin, int64_t row_end) {
      for (int64_t i = row_begin; i < row_end; i++) table.to_f32(q_at(i / count, begin + b + i % count), q_type, query_data + i * Dk, Dk);
    });
    auto scores = at::bmm(query, keys.narrow(1, block_low - low, block_keys).transpose(1, 2));
    float* score_data = scores.data_ptr<float>();
    at::parallel_for(0, H * count, std::max<int64_t>(1, kGrainElements / block_keys), [&](int64_t row_begin, int64_t row_end) {
      for (int64_t i = row_begin; i < row_end; i++) {
        int64_t position = start + b + i % count;
        table.softmax_row({score_data + i * block_keys, block_keys, first_visible(pool, position) - block_low, position + 1 - block_low, scale, softcap, sinks != nullptr, sinks ? sinks[i / count] : 0});
      }
    });
    auto result = at::bmm(scores, values.narrow(1, block_low - low, block_keys));
    const float* result_data = result.const_data_ptr<float>();
    at::parallel_for(0, H * count, std::max<int64_t>(1, kGrainElements / Dv), [&](int64_t row_begin, int64_t row_end) {
      for (int64_t i = row_begin; i < row_end; i++) table.from_f32(result_data + i * Dv, out_at(begin + b + i % count, i / count), q_type, Dv);
    });
  }
}

// Every block a query of this step may read lies in the pool. Checked once per step and pool geometry.
void check_tables(Step& step, const Pool& pool) {
  auto key = std::make_tuple(pool.block_size, pool.window, pool.chunk, pool.k.size(0));
  if (step.checked.count(key)) return;
  for (int64_t s = 0; s < step.num_sequences; s++) {
    if (step.length(s) == 0) continue;
    int64_t last = (step.context[s] - 1) / pool.block_size;
    TORCH_CHECK(last < step.max_blocks, "dayzero: sequence ", s, " needs ", last + 1, " blocks, its table holds ", step.max_blocks);
    for (int64_t b = first_visible(pool, step.first_position(s)) / pool.block_size; b <= last; b++) {
      int32_t block = step.tables[s * step.max_blocks + b];
      TORCH_CHECK(block >= 0 && block < pool.k.size(0), "dayzero: sequence ", s, " names block ", block, " of a pool of ", pool.k.size(0));
    }
  }
  step.checked.insert(key);
}

at::Tensor dense_last(const at::Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

at::Tensor paged_attention(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const std::optional<at::Tensor>& sinks_in, int64_t handle, int64_t layer, double scale, double softcap) {
  at::AutoDispatchBelowAutograd below_autograd;
  auto state = states().at(handle);
  auto found = state->pools.find(layer);
  TORCH_CHECK(found != state->pools.end(), "dayzero::paged_attention: layer ", layer, " has no pool");
  const Pool& pool = found->second;
  Step& step = state->step;
  TORCH_CHECK(q_in.dim() == 4 && k_in.dim() == 4 && v_in.dim() == 4 && q_in.size(0) == 1, "dayzero::paged_attention wants q, k, v of [1, heads, T, D]");
  int64_t H = q_in.size(1), Hkv = k_in.size(1), Dk = q_in.size(3), Dv = v_in.size(3);
  TORCH_CHECK(q_in.size(2) == step.num_tokens && k_in.size(2) == step.num_tokens && v_in.size(2) == step.num_tokens, "dayzero::paged_attention: the step has ", step.num_tokens, " tokens, q has ", q_in.size(2));
  TORCH_CHECK(Hkv > 0 && H % Hkv == 0 && v_in.size(1) == Hkv && k_in.size(3) == Dk && pool.k.size(2) == Hkv && pool.k.size(3) == Dk && pool.v.size(3) == Dv,
              "dayzero::paged_attention: q ", q_in.sizes(), " k ", k_in.sizes(), " v ", v_in.sizes(), " do not fit pools ", pool.k.sizes(), " and ", pool.v.sizes());
  TORCH_CHECK(!sinks_in || sinks_in->numel() == H, "dayzero::paged_attention: sinks must be [", H, "]");
  check_tables(step, pool);
  auto q = dense_last(q_in), k = dense_last(k_in.to(pool.k.scalar_type())), v = dense_last(v_in.to(pool.v.scalar_type()));
  auto sinks = sinks_in ? sinks_in->to(at::kFloat).contiguous() : at::Tensor();
  auto out = at::empty({1, step.num_tokens, H, Dv}, q.options());
  if (step.num_tokens == 0) return out;
  Attention attention{q, k, v, pool, step, sinks_in ? sinks.const_data_ptr<float>() : nullptr, float(scale), float(softcap), out, H, Hkv, H / Hkv, Dk, Dv, kernel_type(q.scalar_type())};
  attention.store_new();
  attention.attend_rows();
  for (int64_t sequence : step.chunks) {
    if (attention.library_can()) attention.attend_chunk_library(sequence);
    else attention.attend_chunk(sequence);
  }
  return out;
}

// As `paged_attention`, with (handle, layer) in a tensor: a compiled graph takes it as an input and so serves any layer.
at::Tensor paged_attention_at(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& sinks, const at::Tensor& site, double scale, double softcap) {
  const int64_t* at = site.const_data_ptr<int64_t>();
  return paged_attention(q, k, v, sinks, at[0], at[1], scale, softcap);
}

}  // namespace
}  // namespace dayzero

TORCH_LIBRARY_IMPL(dayzero, CPU, m) {
  m.impl("paged_attention", dayzero::paged_attention);
  m.impl("paged_attention_at", dayzero::paged_attention_at);
}
