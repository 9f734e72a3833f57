// Runs a CUDA kernel on the host, one CTA at a time: a fiber for each thread, barriers and warp
// exchanges as scheduling points. For tests of what kernels compute; fibers run in a chosen order,
// so that a missing barrier shows.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct Index { unsigned x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {

enum State { READY, AT_BARRIER, AT_WARP, DONE };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = READY;
  unsigned turn = 0;
};

static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static std::vector<unsigned> slots[2];  // what each lane offers, for alternate exchanges
static unsigned current;
static void (*body)(const void*);
static const void* parameter;

inline void wait_in(State state) {
  fibers[current].state = state;
  swapcontext(&fibers[current].context, &scheduler);
}

inline void entry() {
  body(parameter);
  fibers[current].state = DONE;
}

// Every fiber of [first, last) that still runs waits in `state`: let them all go on.
inline bool release(unsigned first, unsigned last, State state) {
  bool any = false;
  for (unsigned i = first; i < last; ++i) {
    if (fibers[i].state == READY || (fibers[i].state != state && fibers[i].state != DONE))
      return false;
    any |= fibers[i].state == state;
  }
  for (unsigned i = first; i < last; ++i)
    if (fibers[i].state == state) fibers[i].state = READY;
  return any;
}

inline int run_cta(unsigned threads, bool backwards) {
  constexpr size_t STACK = 1 << 17;
  if (fibers.size() < threads) fibers.resize(threads);
  for (auto& s : slots) s.assign(threads, 0);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    if (!f.stack) f.stack.reset(new char[STACK]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = &scheduler;
    f.state = READY, f.turn = 0;
    makecontext(&f.context, entry, 0);
  }
  for (;;) {
    bool ran = false, done = true;
    for (unsigned k = 0; k < threads; ++k) {
      const unsigned i = backwards ? threads - 1 - k : k;
      if (fibers[i].state != READY) continue;
      current = i, threadIdx.x = i, ran = true;
      swapcontext(&scheduler, &fibers[i].context);
    }
    for (unsigned w = 0; w < threads; w += 32)
      ran |= release(w, std::min(w + 32, threads), AT_WARP);
    ran |= release(0, threads, AT_BARRIER);
    for (unsigned i = 0; i < threads; ++i) done &= fibers[i].state == DONE;
    if (done) return 0;
    if (!ran) return 1;  // a barrier that not every thread reaches
  }
}

template <class F>
unsigned exchange(unsigned value, F read) {
  Fiber& f = fibers[current];
  const unsigned turn = f.turn++ & 1, me = current;
  slots[turn][me] = value;
  wait_in(AT_WARP);
  return read(slots[turn].data() + me / 32 * 32, me % 32);
}

template <class A>
int launch(void (*kernel)(A), const A* a, unsigned gx, unsigned gy, unsigned threads, int order) {
  static void (*call)(A);
  call = kernel;
  body = [](const void* p) { call(*static_cast<const A*>(p)); };
  parameter = a;
  gridDim = {gx, gy, 1}, blockDim = {threads, 1, 1};
  for (unsigned y = 0; y < gy; ++y)
    for (unsigned x = 0; x < gx; ++x) {
      blockIdx = {x, y, 0};
      if (run_cta(threads, order != 0)) return 1;
    }
  return 0;
}

}  // namespace emulate

#define FP4_LAUNCHER(kernel, A)                                                              \
  extern "C" int launch_##kernel(const A* a, unsigned gx, unsigned gy, unsigned n, int order) { \
    return emulate::launch<A>(kernel, a, gx, gy, n, order);                                  \
  }

inline void __syncthreads() { emulate::wait_in(emulate::AT_BARRIER); }

inline void __syncwarp() { emulate::exchange(0, [](const unsigned*, unsigned) { return 0u; }); }

inline unsigned __shfl_xor_sync(unsigned, unsigned v, unsigned lane) {
  return emulate::exchange(v, [=](const unsigned* s, unsigned me) { return s[me ^ lane]; });
}

inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  return emulate::exchange(v, [](const unsigned* s, unsigned) { return *std::max_element(s, s + 32); });
}

inline unsigned atomicMax(unsigned* p, unsigned v) {
  const unsigned old = *p;
  *p = std::max(old, v);
  return old;
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i)
    out |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return out;
}

// The half precision bits of a number >= 0 that FP16 holds exactly.
inline unsigned exact_f16(float v) {
  if (v < 0x1p-14f) return (unsigned)std::lrint((double)v * 16777216.0);
  unsigned b;
  __builtin_memcpy(&b, &v, 4);
  return (b >> 13) - (112u << 10);
}
