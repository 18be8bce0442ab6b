// Runs the operators without Python, for the address and thread sanitizers (lohan_ds/tests/test_ops.py builds it so):
// arrays of exactly their size, at odd addresses, every instruction set, one to four threads, two callers at once.
// Ends with 0 if all gave the bits of one scalar thread, else says what differed and ends with 1.
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../cpu_adam/op.h"
#include "../grad_accumulate/op.h"
#include "grad_pack_host.cpp"

namespace {

using lohan::Dtype;
using lohan::Isa;

constexpr Isa kIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512};
constexpr Dtype kDtypes[] = {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16};
constexpr int64_t kNumels[] = {1, 7, 130, 1025, 140001};   // the last one is of two pieces

bool same(const std::vector<float>& x, const std::vector<float>& y) {
    return std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

// (numel,) of `dtype`, in a vector that holds not one byte more.
std::vector<char> as_bytes(Dtype dtype, const std::vector<float>& values) {
    const auto itemsize = static_cast<size_t>(lohan::itemsize(dtype));
    std::vector<char> bytes(values.size() * itemsize);
    for (size_t i = 0; i < values.size(); ++i) {
        const uint16_t half = dtype == Dtype::kBf16 ? lohan::to_bf16(values[i]) : lohan::to_fp16(values[i]);
        if (dtype == Dtype::kFp32) std::memcpy(&bytes[i * itemsize], &values[i], itemsize);
        else std::memcpy(&bytes[i * itemsize], &half, itemsize);
    }
    return bytes;
}

struct State {
    std::vector<float> master, exp_avg, exp_avg_sq, grads;
    std::vector<char> out;

    explicit State(int64_t numel) {
        std::mt19937 random(static_cast<uint32_t>(numel) + 1);
        std::normal_distribution<float> normal;
        for (std::vector<float>* array : {&master, &exp_avg, &exp_avg_sq, &grads}) {
            array->resize(static_cast<size_t>(numel));
            for (float& value : *array) value = normal(random);
        }
        for (float& value : exp_avg_sq) value *= value;
    }
};

State adam(int64_t numel, Dtype grad_dtype, bool l2, int num_threads, Isa isa) {
    State state(numel);
    const std::vector<char> grad = as_bytes(grad_dtype, state.grads);
    state.out.resize(static_cast<size_t>(numel) * 2);
    const lohan::AdamScalars scalars{0.37f, l2 ? 1.0f : 0.999f, l2 ? 0.1f : 0.0f, l2 ? 0.9f : 0.1f, 0.999f, 0.001f,
                                     0.05f, 1e-8f, 1e-3f};
    const Dtype out_dtype = grad_dtype == Dtype::kFp16 ? Dtype::kFp16 : Dtype::kBf16;
    lohan::adam_update(scalars, {state.master.data(), grad.data(), state.exp_avg.data(), state.exp_avg_sq.data(),
                                 state.out.data(), grad_dtype, out_dtype, numel}, num_threads, isa);
    return state;
}

struct Held {
    std::vector<float> target;
    std::vector<double> parts;
};

Held accumulate(int64_t numel, Dtype grad_dtype, int num_threads, Isa isa) {
    State state(numel);
    const std::vector<char> grad = as_bytes(grad_dtype, state.grads);
    Held held{state.master, std::vector<double>(static_cast<size_t>((numel + lohan::kSegmentNumel - 1) /
                                                                    lohan::kSegmentNumel))};
    lohan::grad_accumulate({held.target.data(), grad.data(), held.parts.data(), Dtype::kFp32, grad_dtype, numel, true},
                           num_threads, isa);
    return held;
}

// Two gradients of `numel` elements, packed by the GPU's arithmetic, against the CPU's sums of one.
int check_pack(int64_t numel, Dtype dtype) {
    const std::vector<char> grad = as_bytes(dtype, State(numel).grads);
    std::vector<double> want(static_cast<size_t>((numel + lohan::kSegmentNumel - 1) / lohan::kSegmentNumel));
    lohan::grad_accumulate({nullptr, grad.data(), want.data(), Dtype::kFp32, dtype, numel, false}, 1, Isa::kScalar);
    std::vector<char> out(2 * grad.size()), twice(grad);
    twice.insert(twice.end(), grad.begin(), grad.end());
    std::vector<double> sums(2 * want.size()), want_sums(want);
    want_sums.insert(want_sums.end(), want.begin(), want.end());
    const void* grads[] = {grad.data(), grad.data()};
    const int64_t numels[] = {numel, numel}, offsets[] = {0, numel};
    lohan_pack_on_host(2, grads, numels, offsets, out.data(), sums.data(), static_cast<int>(dtype), 1.0f);
    const int num_bad = (out != twice) + (sums != want_sums);
    if (num_bad) {
        std::printf("packing: numel %lld dtype %d: %d results differ\n", static_cast<long long>(numel),
                    static_cast<int>(dtype), num_bad);
    }
    return num_bad;
}

int check(int64_t numel, Dtype dtype, int num_threads, Isa isa) {
    int num_bad = 0;
    for (const bool l2 : {false, true}) {
        const State want = adam(numel, dtype, l2, 1, Isa::kScalar), got = adam(numel, dtype, l2, num_threads, isa);
        num_bad += !(same(got.master, want.master) && same(got.exp_avg, want.exp_avg) &&
                     same(got.exp_avg_sq, want.exp_avg_sq) && got.out == want.out);
    }
    const Held want = accumulate(numel, dtype, 1, Isa::kScalar), got = accumulate(numel, dtype, num_threads, isa);
    num_bad += !(same(got.target, want.target) && got.parts == want.parts);
    if (num_bad) {
        std::printf("numel %lld dtype %d threads %d instruction set %d: %d results differ\n",
                    static_cast<long long>(numel), static_cast<int>(dtype), num_threads, static_cast<int>(isa), num_bad);
    }
    return num_bad;
}

}  // namespace

int main() {
    int num_bad = 0;
    for (const Dtype dtype : kDtypes) {
        for (const int64_t numel : kNumels) num_bad += check_pack(numel, dtype);
    }
    for (const Isa isa : kIsas) {
        if (!lohan::is_present(isa)) continue;
        for (const Dtype dtype : kDtypes) {
            for (const int64_t numel : kNumels) num_bad += check(numel, dtype, 1 + static_cast<int>(numel % 4), isa);
        }
    }
    int from_other = 0;
    std::thread other([&from_other] { from_other = check(300001, Dtype::kBf16, 3, Isa::kBest); });
    num_bad += check(300001, Dtype::kFp32, 4, Isa::kBest);
    other.join();
    return num_bad + from_other != 0;
}
