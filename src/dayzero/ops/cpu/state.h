// What an engine keeps between operator calls, found by an integer handle: the pools of each layer and the current step.
// Several engines live in one process; a handle is never reused. One engine's calls come from one thread at a time.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>
#include <ATen/core/Tensor.h>
#include "kernels.h"

namespace dayzero {

struct Pool {
  at::Tensor k, v;                       // [num_blocks, block_size, Hkv, D]
  DType type = DType::f32;
  int64_t block_size = 0, window = 0, chunk = 0;
};

struct Segment { int64_t begin, end; bool by_row; };     // rows [begin, end) of the step's token axis
struct QueryRow { int64_t token, sequence, position; };

// Sequences with at most this many new tokens are computed row by row, exactly as if they were decoded.
constexpr int64_t kShortSegment = 8;

struct Step {
  int64_t num_tokens = 0, num_sequences = 0, num_decode = 0, max_blocks = 0;
  std::vector<int32_t> offsets, context, tables;         // [S+1], [S], [S, max_blocks]
  std::vector<Segment> segments;                         // neighbouring rows computed by row are one segment
  std::vector<QueryRow> rows;                            // queries attended row by row
  std::vector<int64_t> chunks;                           // sequences attended as a prefill chunk
  std::set<std::tuple<int64_t, int64_t, int64_t, int64_t>> checked;   // block tables seen to be in range, by pool geometry

  int64_t length(int64_t s) const { return offsets[s + 1] - offsets[s]; }
  int64_t first_position(int64_t s) const { return context[s] - length(s); }
};

constexpr int64_t kManyRows = 1 << 30, kFewRowsEngine = 8;

// `max_rows`: the most rows that ever decode together, which picks the row kernels once for the engine's whole life.
struct StepState { std::map<int64_t, Pool> pools; Step step; int64_t max_rows = kManyRows; };

// First key visible to the query at `position`; the last is `position` itself.
inline int64_t first_visible(const Pool& pool, int64_t position) {
  int64_t low = 0;
  if (pool.window > 0 && position - pool.window + 1 > low) low = position - pool.window + 1;
  if (pool.chunk > 0 && position / pool.chunk * pool.chunk > low) low = position / pool.chunk * pool.chunk;
  return low;
}

class States {
 public:
  int64_t create() {
    std::lock_guard<std::mutex> lock(mutex_);
    states_.emplace(next_, std::make_shared<StepState>());
    return next_++;
  }
  void destroy(int64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(states_.erase(handle) == 1, "dayzero: no state has handle ", handle);
  }
  std::shared_ptr<StepState> at(int64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = states_.find(handle);
    TORCH_CHECK(found != states_.end(), "dayzero: no state has handle ", handle);
    return found->second;
  }
 private:
  std::mutex mutex_;
  int64_t next_ = 0;
  std::unordered_map<int64_t, std::shared_ptr<StepState>> states_;
};

States& states();
const KernelTable& kernels();            // the instruction set in use
// The same, but vector kernels instead of tiles for an engine of few rows: tiles are made for 16, vectors stream weights
// faster below about 8. One engine always uses the same, so that a row's bits do not depend on its company.
const KernelTable& row_kernels(const StepState* state);
const KernelTable& few_row_kernels();
bool is_kernel_type(at::ScalarType type);
DType kernel_type(at::ScalarType type);

// Per-thread memory that grows and is kept. A slot has one user at a time in a thread.
enum ScratchSlot { kScratchPack, kScratchPartial, kScratchQuery, kScratchPointers, kScratchOut, kNumScratch };
char* scratch(ScratchSlot slot, size_t num_bytes);

}  // namespace dayzero
