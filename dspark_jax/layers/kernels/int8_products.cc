// y_i[rows, out_i] = x[rows, in] · W_iᵀ with int8 weights and float32 activations, for XLA's CPU backend.
//
// Weights come in blocks of 32 outputs: values [blocks, groups, 8, 32, 4] int8 and scales [blocks, groups, 32] float32,
// so that a block is one stream of memory. A group is 32 inputs, four of which lie side by side for each output, as the
// processor's matrix unit (AMX) reads them; the last group is padded with zeros. For each row and output the order of
// operations is fixed: the products of a group are summed, and each sum times its scale is added to the result. A row's
// result therefore does not depend on how many rows there are or on the threads. It does not depend on the width of
// vectors either; only the portable path, where the processor lacks a fused multiply-add, rounds more, and AMX, which
// sums integers exactly, less.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

#include "int8_amx.h"
#include "int8_vectors.h"

namespace ffi = xla::ffi;

namespace {

// Under so many multiplications a second thread costs more than it saves.
constexpr int64_t kWorthAThread = 1 << 17;
constexpr int64_t kMostWorkers = 64;

// Tiles for 1, 2, 4 and 8 rows.
using Tiles = std::array<Tile, 4>;

enum Path : int64_t { kPortable, kAvx2, kAvx512, kAmx };

const Tiles kPaths[] = {
    {TilePortable<1>, TilePortable<2>, TilePortable<4>, TilePortable<8>},
#if defined(__x86_64__)
    {TileAvx2<1>, TileAvx2<2>, TileAvx2<4>, TileAvx2<8>},
    {TileAvx512<1>, TileAvx512<2>, TileAvx512<4>, TileAvx512<8>},
#endif
};

struct Product {
  const int8_t* values;
  const float* scales;
  float* y;
  int64_t out;
  int64_t blocks;
};

// The number of rows that a tile for `rows` rows has: 2^size of them.
int SizeOver(int64_t rows) {
  int size = 0;
  while ((int64_t{1} << size) < rows && size < 3) ++size;
  return size;
}

// What the threads of one call share. A thread that comes late finds all blocks taken and touches nothing else.
struct Call {
  Path path;
  const float* x;  // [rows, 32 · groups]
  int64_t rows, groups;
  std::vector<Product> products;
  int64_t blocks, workers;
  std::vector<float> padded;
#if defined(WITH_AMX)
  std::vector<DigitGroup> digits;  // of each eight rows, all groups
#endif
  // Worker w begins with the blocks from `begin(w)`, so that it reads one stream, and then helps the others.
  std::array<std::atomic<int64_t>, kMostWorkers> next;
  std::atomic<int64_t> done{0};

  int64_t begin(int64_t worker) const { return blocks * worker / workers; }

  void Work(int64_t first) {
    int configured = -1;
    for (int64_t i = 0; i < workers; ++i) {
      const int64_t worker = (first + i) % workers;
      const int64_t end = begin(worker + 1);
      int64_t block;
      while ((block = next[worker].fetch_add(1, std::memory_order_relaxed)) < end) {
        Block(block, configured);
        done.fetch_add(1, std::memory_order_release);
      }
    }
    Release(configured);
  }

#if defined(WITH_AMX)
  __attribute__((target("amx-tile"))) static void Release(int configured) {
    if (configured >= 0) _tile_release();
  }

  // Rows that no whole tile is left for are padded: that costs the matrix unit less than another pass.
  void BlockAmx(int64_t row, const int8_t* values, const float* scales, float (*sums)[kBlock], int& configured) const {
    static constexpr decltype(&TileAmx<1>) kTiles[] = {TileAmx<1>, TileAmx<2>, TileAmx<4>, TileAmx<8>};
    const int size = SizeOver(rows - row);
    if (configured != size) ConfigureTiles(1 << size);
    configured = size;
    kTiles[size](digits.data() + row / kRows * groups, groups, values, scales, sums);
  }
#else
  static void Release(int) {}
#endif

  void Block(int64_t block, int& configured) const {
    const Product* product = products.data();
    for (; block >= product->blocks; ++product) block -= product->blocks;
    const int8_t* values = product->values + block * groups * kGroup * kBlock;
    const float* scales = product->scales + block * groups * kBlock;
    const int64_t width = std::min(kBlock, product->out - block * kBlock);
    alignas(64) float sums[kRows][kBlock];
    for (int64_t row = 0; row < rows;) {
      int64_t count;
#if defined(WITH_AMX)
      if (path == kAmx) {
        BlockAmx(row, values, scales, sums, configured);
        count = std::min<int64_t>(kRows, rows - row);
      } else
#endif
      {
        int size = SizeOver(rows - row);
        if ((int64_t{1} << size) > rows - row) --size;
        kPaths[path][size](x + row * groups * kGroup, groups, values, scales, sums);
        count = int64_t{1} << size;
      }
      for (int64_t i = 0; i < count; ++i, ++row) {
        std::memcpy(product->y + row * product->out + block * kBlock, sums[i], width * sizeof(float));
      }
    }
  }
};

// Calls whose memory waits for the next one: to ask the system for it anew takes as long as a small product.
class Calls {
 public:
  std::shared_ptr<Call> Take() {
    std::unique_ptr<Call> call;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        call = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (!call) call = std::make_unique<Call>();
    call->products.clear();
    call->blocks = 0;
    call->done.store(0, std::memory_order_relaxed);
    return std::shared_ptr<Call>(call.release(), [this](Call* used) {
      std::lock_guard<std::mutex> lock(mutex_);
      idle_.emplace_back(used);
    });
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Call>> idle_;
};

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

// The best path of this processor: 0 portable, 1 AVX2, 2 AVX-512, 3 AMX.
extern "C" int64_t int8_products_best_path() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) {
#if defined(WITH_AMX)
    if (HasAmx()) return kAmx;
#endif
    return kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  return kPortable;
}

static ffi::Error Int8Products(ffi::ThreadPool pool, int64_t path, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                               ffi::RemainingRets results) {
  static const int64_t best = int8_products_best_path();
  if (path > best) return ffi::Error::InvalidArgument("int8_products: this processor lacks the path asked for");
  // Never destroyed: a late thread may still hand a call back.
  static Calls* const calls = new Calls;
  const std::shared_ptr<Call> call = calls->Take();
  call->path = static_cast<Path>(path < 0 ? best : path);
  call->x = x.typed_data();
  call->rows = x.dimensions()[0];
  const int64_t in = x.dimensions()[1];
  call->groups = (in + kGroup - 1) / kGroup;
  if (in % kGroup) {
    call->padded.assign(call->rows * call->groups * kGroup, 0.0f);
    for (int64_t row = 0; row < call->rows; ++row) {
      std::copy_n(call->x + row * in, in, call->padded.data() + row * call->groups * kGroup);
    }
    call->x = call->padded.data();
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto values = weights.get<ffi::Buffer<ffi::S8>>(2 * i);
    auto scales = weights.get<ffi::Buffer<ffi::F32>>(2 * i + 1);
    auto y = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!values.has_value() || !scales.has_value() || !y.has_value()) {
      return ffi::Error::InvalidArgument("int8_products: weights are int8 values and float32 scales in turn");
    }
    const int64_t blocks = values->dimensions()[0];
    call->products.push_back(
        {values->typed_data(), scales->typed_data(), (*y)->typed_data(), (*y)->dimensions()[1], blocks});
    call->blocks += blocks;
  }
#if defined(WITH_AMX)
  if (call->path == kAmx) {
    const size_t size = (call->rows + kRows - 1) / kRows * call->groups;
    if (call->digits.size() < size) call->digits.resize(size);
    for (int64_t row = 0; row < call->rows; row += kRows) {
      const int count = static_cast<int>(std::min<int64_t>(kRows, call->rows - row));
      WriteDigits(call->x + row * call->groups * kGroup, call->groups, count, 1 << SizeOver(count),
                  call->digits.data() + row / kRows * call->groups);
    }
  }
#endif
  const int64_t work = call->rows * in * call->blocks * kBlock;
  call->workers = std::max<int64_t>(
      1, std::min<int64_t>({pool.num_threads(), call->blocks, work / kWorthAThread, kMostWorkers}));
  for (int64_t worker = 0; worker < call->workers; ++worker) call->next[worker] = call->begin(worker);
  for (int64_t worker = 1; worker < call->workers; ++worker) {
    pool.Schedule([call, worker] { call->Work(worker); });
  }
  call->Work(0);
  // Every block is taken by now: only those that other threads are at remain.
  for (int spins = 0; call->done.load(std::memory_order_acquire) < call->blocks; ++spins) {
    if (spins < 4096) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(int8_products, Int8Products,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("path")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
