// The loop over vectors, for one instruction set. No include guard: op.h includes it once for each, inside a namespace,
// with LOHAN_SIMD and LOHAN_TARGET; see common/simd.h.

using Simd = LOHAN_SIMD;
using Float = Simd::Float;

// Two vectors are done at a time, and rounded to 16 bits so many pairs later: what waits for the divider is then not
// waited for by what could be done meanwhile. Worth a seventh of the whole time, on AVX2.
constexpr int64_t kPairNumel = 2 * Simd::kWidth;
constexpr int64_t kLagNumel = 4 * kPairNumel;

struct Factors {
    Float coefficient, decay, l2, avg_weight, sq_decay, sq_weight, sq_correction, eps, step_size;
    bool has_l2;     // weight decay is added to the gradient
    bool from_old;   // exp_avg moves from its old value, else from the gradient
};

LOHAN_TARGET LOHAN_INLINE Factors factors_of(const AdamScalars& s) {
    const bool from_old = moves_from_old(s);
    return {Simd::set(s.coefficient),
            Simd::set(s.decay),
            Simd::set(s.l2),
            Simd::set(from_old ? s.avg_weight : s.avg_weight - 1.0f),
            Simd::set(s.sq_decay),
            Simd::set(s.sq_weight),
            Simd::set(s.sq_correction),
            Simd::set(s.eps),
            Simd::set(s.step_size),
            has_l2(s),
            from_old};
}

template <Dtype kGrad>
LOHAN_TARGET LOHAN_INLINE Float load_grad(const void* grads, int64_t i) {
    if constexpr (kGrad == Dtype::kFp32) return Simd::load(static_cast<const float*>(grads) + i);
    else if constexpr (kGrad == Dtype::kBf16) return Simd::load_bf16(static_cast<const uint16_t*>(grads) + i);
    else return Simd::load_fp16(static_cast<const uint16_t*>(grads) + i);
}

// Elements i..i+kWidth. kUsual: there is no L2, and exp_avg moves from its old value.
template <Dtype kGrad, bool kUsual>
LOHAN_TARGET LOHAN_INLINE void update_vector(const Factors& k, const AdamArrays& a, int64_t i) {
    Float grad = Simd::mul(load_grad<kGrad>(a.grad, i), k.coefficient);
    const Float master = Simd::load(a.master + i);
    if (!kUsual && k.has_l2) grad = Simd::fma(master, k.l2, grad);
    const Float old_avg = Simd::load(a.exp_avg + i);
    const Float avg = Simd::fma(Simd::sub(grad, old_avg), k.avg_weight, kUsual || k.from_old ? old_avg : grad);
    const Float old_sq = Simd::mul(Simd::load(a.exp_avg_sq + i), k.sq_decay);
    const Float avg_sq = Simd::fma(Simd::mul(grad, k.sq_weight), grad, old_sq);
    Simd::store(a.exp_avg + i, avg);
    Simd::store(a.exp_avg_sq + i, avg_sq);
    const Float denominator = Simd::add(Simd::div(Simd::sqrt(avg_sq), k.sq_correction), k.eps);
    const Float change = Simd::div(Simd::mul(k.step_size, avg), denominator);
    Simd::store(a.master + i, Simd::sub(Simd::mul(master, k.decay), change));
}

// Elements i..i+kPairNumel of `out`. For bf16 NaN comes out wrong and is only flagged.
template <Dtype kOut>
LOHAN_TARGET LOHAN_INLINE void round_pair(const AdamArrays& a, int64_t i, Simd::Flag& nan) {
    const Float x = Simd::load(a.master + i), y = Simd::load(a.master + i + Simd::kWidth);
    uint16_t* out = static_cast<uint16_t*>(a.out) + i;
    if constexpr (kOut == Dtype::kBf16) {
        nan = Simd::flag_nan(nan, x, y);
        Simd::store_bf16(out, x, y);
    } else {
        Simd::store_fp16(out, x, y);
    }
}

// Elements start..end, whole pairs. kOut: fp32 for no `out`.
template <Dtype kGrad, Dtype kOut, bool kUsual>
LOHAN_TARGET void update_pairs(const AdamScalars& scalars, const AdamArrays& arrays, int64_t start, int64_t end) {
    const AdamArrays a = arrays;
    const Factors k = factors_of(scalars);
    [[maybe_unused]] Simd::Flag nan = Simd::no_flag();
    for (int64_t i = start; i < end; i += kPairNumel) {
        if constexpr (kOut != Dtype::kFp32) {
            if (i - kLagNumel >= start) round_pair<kOut>(a, i - kLagNumel, nan);
        }
        update_vector<kGrad, kUsual>(k, a, i);
        update_vector<kGrad, kUsual>(k, a, i + Simd::kWidth);
    }
    if constexpr (kOut != Dtype::kFp32) {
        for (int64_t i = std::max(start, end - kLagNumel); i < end; i += kPairNumel) round_pair<kOut>(a, i, nan);
    }
    if constexpr (kOut == Dtype::kBf16) {
        if (!Simd::any(nan)) return;
        uint16_t* out = static_cast<uint16_t*>(a.out);
        for (int64_t i = start; i < end; ++i) out[i] = to_bf16(a.master[i]);
    }
}

// Elements start..end; the rest after the last whole pair goes through arrays of one pair, filled up with zeros.
template <Dtype kGrad, Dtype kOut, bool kUsual>
void update_range(const AdamScalars& scalars, const AdamArrays& a, int64_t start, int64_t end) {
    const int64_t rest_start = end - (end - start) % kPairNumel;
    update_pairs<kGrad, kOut, kUsual>(scalars, a, start, rest_start);
    if (rest_start == end) return;
    const auto numel = static_cast<size_t>(end - rest_start), grad_itemsize = static_cast<size_t>(itemsize(kGrad));
    float master[kPairNumel] = {}, exp_avg[kPairNumel] = {}, exp_avg_sq[kPairNumel] = {}, grad[kPairNumel] = {};
    uint16_t out[kPairNumel];
    std::memcpy(master, a.master + rest_start, numel * sizeof(float));
    std::memcpy(exp_avg, a.exp_avg + rest_start, numel * sizeof(float));
    std::memcpy(exp_avg_sq, a.exp_avg_sq + rest_start, numel * sizeof(float));
    std::memcpy(grad, static_cast<const char*>(a.grad) + rest_start * itemsize(kGrad), numel * grad_itemsize);
    const AdamArrays padded{master, grad, exp_avg, exp_avg_sq, out, kGrad, kOut, kPairNumel};
    update_pairs<kGrad, kOut, kUsual>(scalars, padded, 0, kPairNumel);
    std::memcpy(a.master + rest_start, master, numel * sizeof(float));
    std::memcpy(a.exp_avg + rest_start, exp_avg, numel * sizeof(float));
    std::memcpy(a.exp_avg_sq + rest_start, exp_avg_sq, numel * sizeof(float));
    if constexpr (kOut != Dtype::kFp32) {
        std::memcpy(static_cast<uint16_t*>(a.out) + rest_start, out, numel * sizeof(uint16_t));
    }
}
