// y_i[rows, out_i] = x[rows, in] · W_iᵀ with int8 weights and float32 activations, for XLA's CPU backend.
//
// Weights come in blocks of 32 outputs: values [blocks, in, 32] int8 and scales [blocks, ceil(in / 32), 32] float32, so
// that a block is one stream of memory and every lane of a vector is an output of its own. For each row and output the
// order of operations is fixed: products of a group of 32 inputs are summed one after the other, each sum times its
// scale is added to the result. A row's result therefore does not depend on how many rows there are, on the threads,
// or on the width of the vectors; only the portable path, where the processor lacks a fused multiply-add, rounds more.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kBlock = 32;  // outputs
constexpr int64_t kGroup = 32;  // inputs that share a scale
constexpr int kRows = 8;        // rows at a time: their sums fill the registers of AVX-512
constexpr int64_t kAhead = 2048;  // bytes to prefetch ahead
// Under so many multiplications a second thread costs more than it saves.
constexpr int64_t kWorthAThread = 1 << 17;

// One block of outputs for `ROWS` rows: sums[row][output].
using Tile = void (*)(const float* x, int64_t in, const int8_t* values, const float* scales, float (*sums)[kBlock]);

template <int ROWS>
void TilePortable(const float* x, int64_t in, const int8_t* values, const float* scales, float (*sums)[kBlock]) {
  const auto multiply_add = [](float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
  };
  std::memset(sums, 0, ROWS * sizeof(*sums));
  for (int64_t begin = 0; begin < in; begin += kGroup, scales += kBlock) {
    float group[ROWS][kBlock] = {};
    for (int64_t k = begin; k < std::min(begin + kGroup, in); ++k, values += kBlock) {
      for (int row = 0; row < ROWS; ++row) {
        for (int64_t o = 0; o < kBlock; ++o) {
          group[row][o] = multiply_add(static_cast<float>(values[o]), x[row * in + k], group[row][o]);
        }
      }
    }
    for (int row = 0; row < ROWS; ++row) {
      for (int64_t o = 0; o < kBlock; ++o) sums[row][o] = multiply_add(scales[o], group[row][o], sums[row][o]);
    }
  }
}

#if defined(__x86_64__)

template <int ROWS>
__attribute__((target("avx2,fma"))) void TileAvx2(const float* x, int64_t in, const int8_t* values,
                                                  const float* scales, float (*sums)[kBlock]) {
  // Two vectors of outputs at a time for four rows: sixteen registers hold no more.
  constexpr int kPart = ROWS < 4 ? ROWS : 4;
  static_assert(ROWS % kPart == 0);
  std::memset(sums, 0, ROWS * sizeof(*sums));
  for (int64_t begin = 0; begin < in; begin += kGroup, scales += kBlock) {
    const int64_t count = std::min(kGroup, in - begin);
    for (int64_t o = 0; o < kBlock; o += 16) {
      const __m256 scale0 = _mm256_loadu_ps(scales + o), scale1 = _mm256_loadu_ps(scales + o + 8);
      for (int part = 0; part < ROWS; part += kPart) {
        __m256 group[kPart][2];
        for (int row = 0; row < kPart; ++row) group[row][0] = group[row][1] = _mm256_setzero_ps();
        for (int64_t k = 0; k < count; ++k) {
          const int8_t* at = values + k * kBlock + o;
          _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
          const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
          const __m256 w0 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
          const __m256 w1 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
          for (int row = 0; row < kPart; ++row) {
            const __m256 factor = _mm256_broadcast_ss(x + (part + row) * in + begin + k);
            group[row][0] = _mm256_fmadd_ps(w0, factor, group[row][0]);
            group[row][1] = _mm256_fmadd_ps(w1, factor, group[row][1]);
          }
        }
        for (int row = 0; row < kPart; ++row) {
          float* sum = sums[part + row] + o;
          _mm256_storeu_ps(sum, _mm256_fmadd_ps(scale0, group[row][0], _mm256_loadu_ps(sum)));
          _mm256_storeu_ps(sum + 8, _mm256_fmadd_ps(scale1, group[row][1], _mm256_loadu_ps(sum + 8)));
        }
      }
    }
    values += count * kBlock;
  }
}

template <int ROWS>
__attribute__((target("avx512f"))) void TileAvx512(const float* x, int64_t in, const int8_t* values,
                                                   const float* scales, float (*sums)[kBlock]) {
  __m512 sum[ROWS][2];
  for (int row = 0; row < ROWS; ++row) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
  for (int64_t begin = 0; begin < in; begin += kGroup, scales += kBlock) {
    const int64_t count = std::min(kGroup, in - begin);
    __m512 group[ROWS][2];
    for (int row = 0; row < ROWS; ++row) group[row][0] = group[row][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < count; ++k, values += kBlock) {
      _mm_prefetch(reinterpret_cast<const char*>(values + kAhead), _MM_HINT_T0);
      const __m128i* bytes = reinterpret_cast<const __m128i*>(values);
      const __m512 w0 = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
      const __m512 w1 = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
      for (int row = 0; row < ROWS; ++row) {
        const __m512 factor = _mm512_set1_ps(x[row * in + begin + k]);
        group[row][0] = _mm512_fmadd_ps(w0, factor, group[row][0]);
        group[row][1] = _mm512_fmadd_ps(w1, factor, group[row][1]);
      }
    }
    const __m512 scale0 = _mm512_loadu_ps(scales), scale1 = _mm512_loadu_ps(scales + 16);
    for (int row = 0; row < ROWS; ++row) {
      sum[row][0] = _mm512_fmadd_ps(scale0, group[row][0], sum[row][0]);
      sum[row][1] = _mm512_fmadd_ps(scale1, group[row][1], sum[row][1]);
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    _mm512_storeu_ps(sums[row], sum[row][0]);
    _mm512_storeu_ps(sums[row] + 16, sum[row][1]);
  }
}

#endif

// Tiles for 1, 2, 4 and 8 rows.
using Tiles = std::array<Tile, 4>;

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

// What the threads of one call share. A thread that comes late finds all blocks taken and touches nothing else.
struct Call {
  Tiles tiles;
  const float* x;
  int64_t rows, in;
  std::vector<Product> products;
  int64_t blocks, workers;
  // Worker w begins with the blocks from `begin(w)`, so that it reads one stream, and then helps the others.
  std::unique_ptr<std::atomic<int64_t>[]> next;
  std::atomic<int64_t> done{0};

  int64_t begin(int64_t worker) const { return blocks * worker / workers; }

  void Work(int64_t first) {
    for (int64_t i = 0; i < workers; ++i) {
      const int64_t worker = (first + i) % workers;
      const int64_t end = begin(worker + 1);
      int64_t block;
      while ((block = next[worker].fetch_add(1, std::memory_order_relaxed)) < end) {
        Block(block);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  }

  void Block(int64_t block) const {
    const Product* product = products.data();
    for (; block >= product->blocks; ++product) block -= product->blocks;
    const int8_t* values = product->values + block * in * kBlock;
    const float* scales = product->scales + block * ((in + kGroup - 1) / kGroup) * kBlock;
    const int64_t width = std::min(kBlock, product->out - block * kBlock);
    alignas(64) float sums[kRows][kBlock];
    for (int64_t row = 0; row < rows;) {
      int size = 3;
      while ((int64_t{1} << size) > rows - row) --size;
      tiles[size](x + row * in, in, values, scales, sums);
      for (int i = 0; i < 1 << size; ++i, ++row) {
        std::memcpy(product->y + row * product->out + block * kBlock, sums[i], width * sizeof(float));
      }
    }
  }
};

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

// The widest path of this processor: 0 portable, 1 AVX2, 2 AVX-512.
extern "C" int64_t int8_products_best_path() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

static ffi::Error Int8Products(ffi::ThreadPool pool, int64_t path, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                               ffi::RemainingRets results) {
  static const int64_t best = int8_products_best_path();
  if (path > best) return ffi::Error::InvalidArgument("int8_products: this processor lacks the path asked for");
  auto call = std::make_shared<Call>();
  call->tiles = kPaths[path < 0 ? best : path];
  call->x = x.typed_data();
  call->rows = x.dimensions()[0];
  call->in = x.dimensions()[1];
  call->blocks = 0;
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
  const int64_t work = call->rows * call->in * call->blocks * kBlock;
  call->workers = std::max<int64_t>(1, std::min<int64_t>({pool.num_threads(), call->blocks, work / kWorthAThread}));
  call->next = std::make_unique<std::atomic<int64_t>[]>(call->workers);
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
