// SPDX-License-Identifier: Apache-2.0
// What filters keep of a row whose list of best tokens is too short, so that the row is read again: the borders of top-p
// and min-p, and the tokens up to a border.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "sampling_row.h"

namespace fused_topk::cpu {

// If the estimate of the border of top-p fails, the border is searched by so many leading bits of the keys.
constexpr u32 kBinBits = 16;
// The estimate is from about so many tokens of a row, and at least so many of each block.
constexpr u32 kSampled = 8192, kSampledOfBlock = 256;
constexpr u32 kBins = 1024;
// The bounds lie so many standard deviations below and above the estimate.
constexpr double kDeviations = 3.0;
// Tokens between the bounds of an estimate, and tokens that are drawn from as a list.
constexpr u32 kMostBetween = 1 << 13, kMostListed = 2048;

// Logits from `low` on, below `end`.
struct Band {
  float low, end;
};

struct KeptOfRows {
  const VectorKernels& kernels;
  const u32 vocab_size;

  // The border of min-p, by bisection: a token with a smaller key has no greater weight.
  u64 border_of_min_p(const SampleRow& row, float m) const {
    u32 high = key_of_logit(m), low = kNegativeInfinityKey;
    while (low < high) {
      const u32 middle = low + (high - low) / 2;
      if (weight_of(row, logit_of_key(middle), m) < row.min_p) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return last_of_key(high);
  }

  // The border of top-p: the last token of the shortest prefix of the sorted row whose weights sum to top_p of all. A sample
  // of the row says where the border should be; if it is not there, the result is kKeepAll. Also leaves the sum of what is
  // kept of each block in workspace.sums.
  u64 border_by_estimate(const SampleRow& row, float m, SampleWorkspace& workspace) const {
    const double total = sum_of_all(row, m, workspace), aim = aim_of_top_p(row, total);
    const Band band = estimated_band(row, total - aim, m, workspace);
    const Exponential exponential = exponential_of(row, m);
    float* const values = room_for(workspace.values, kMostBetween + kBlock);
    u32* const indices = room_for(workspace.indices, kMostBetween + kBlock);
    workspace.sums.resize(row.reader.blocks());
    workspace.begins.resize(row.reader.blocks() + 1);
    u32 size = 0, count = 0;
    double above = 0.0;
    for (u32 block = 0; block < row.reader.blocks() && size <= kMostBetween; ++block) {
      const float* const x = row.reader.load(block, workspace.buffer);
      workspace.sums[block] = kernels.sum_exp_above(x, row.reader.elements_of(block), block * kBlock, band.low,
                                                    band.end, exponential, &count, values, indices, &size);
      above += workspace.sums[block];
      workspace.begins[block + 1] = size;
    }
    if (size > kMostBetween) return kKeepAll;
    const float* const weights = weigh(row, size, m, workspace);
    // Bins of the logit narrow the search, so that few tokens are sorted.
    const float top = std::min(band.end, m), per_logit = float(kBins) / std::max(top - band.low, 1e-30f);
    const int* const bin_of = fill_bins(values, weights, size, top, per_logit, workspace);
    const std::vector<double>& bins = workspace.bins;
    int bin = 0;
    double before = above;
    while (bin < int(kBins) && before + bins[bin] < aim) before += bins[bin++];
    if (bin == int(kBins) || above >= aim) return kKeepAll;
    std::vector<u64>& of_bin = workspace.of_bin;
    of_bin.clear();
    for (u32 i = 0; i < size; ++i)
      if (bin_of[i] == bin) of_bin.push_back(make_candidate(key_of_logit(values[i]), indices[i]));
    const u64 border = border_of_bin(row, before, aim, kKeepAll, m, workspace);
    const float least = logit_of(border);
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      double sum = 0.0;
      for (u32 i = workspace.begins[block]; i < workspace.begins[block + 1]; ++i) {
        const bool is_kept = (values[i] > least) | ((values[i] == least) & (indices[i] <= index_of(border)));
        sum += is_kept ? weights[i] : 0.0f;
      }
      workspace.sums[block] += sum;
    }
    return border;
  }

  // The border of top-p of any row. Counts only tokens that do not rank behind `least`. Sums the weights by the leading bits
  // of the keys, and sorts only the tokens of the bin that has the border.
  u64 border_of_top_p(const SampleRow& row, u64 least, float m, SampleWorkspace& workspace) const {
    std::vector<double>& bins = workspace.bins;
    bins.assign(size_t(1) << kBinBits, 0.0);
    const Exponential exponential = exponential_of(row, m);
    const u32 least_key = key_of(least);
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = row.reader.elements_of(block);
      const float* const x = row.reader.load(block, workspace.buffer);
      kernels.full_rows->exp_terms(x, n, exponential, workspace.terms, x, 0);
      for (u32 i = 0; i < n; ++i) {
        const u32 key = key_of_logit(x[i]);
        if (key >= least_key) bins[key >> (32 - kBinBits)] += workspace.terms[i];
      }
    }
    double total = 0.0;
    for (size_t bin = bins.size(); bin-- > 0;) total += bins[bin];
    const double aim = aim_of_top_p(row, total);
    double before = 0.0;
    u32 bin = u32(bins.size()) - 1;
    while (bin > least_key >> (32 - kBinBits) && before + bins[bin] < aim) before += bins[bin--];

    std::vector<u64>& of_bin = workspace.of_bin;
    of_bin.clear();
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = row.reader.elements_of(block);
      const float* const x = row.reader.load(block, workspace.buffer);
      for (u32 i = 0; i < n; ++i) {
        const u32 key = key_of_logit(x[i]);
        if (key >> (32 - kBinBits) == bin && key >= least_key)
          of_bin.push_back(make_candidate(key, block * kBlock + i));
      }
    }
    return border_of_bin(row, before, aim, least, m, workspace);
  }

  // The elements of a block, -inf where they rank behind the border.
  const float* load_kept(const SampleRow& row, u32 block, u64 border, SampleWorkspace& workspace) const {
    const float* const x = row.reader.load(block, workspace.buffer);
    if (border == kKeepAll) return x;
    const u32 n = row.reader.elements_of(block), begin = block * kBlock;
    const float least = logit_of(border);
    // Of the tokens that tie with the border, those up to the border's own index are kept.
    const u32 cut = std::min(index_of(border), vocab_size - 1);
    const u32 ties = cut < begin ? 0 : std::min(n, cut - begin + 1);
    float* const y = workspace.buffer;
    for (u32 i = 0; i < ties; ++i) y[i] = x[i] >= least ? x[i] : -kInfinity;
    for (u32 i = ties; i < n; ++i) y[i] = x[i] > least ? x[i] : -kInfinity;
    return y;
  }

  // Tokens that do not rank behind the border, of a row that was not listed.
  u64 count_kept(const SampleRow& row, u64 border, SampleWorkspace& workspace) const {
    u64 count = 0;
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const float* const x = load_kept(row, block, border, workspace);
      for (u32 i = 0; i < row.reader.elements_of(block); ++i) count += x[i] != -kInfinity;
    }
    return count;
  }

  // Sums what is kept of each block.
  void sum_kept(const SampleRow& row, u64 border, float m, SampleWorkspace& workspace) const {
    const Exponential exponential = exponential_of(row, m);
    workspace.sums.resize(row.reader.blocks());
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const float* const x = load_kept(row, block, border, workspace);
      workspace.sums[block] = kernels.sum_exp(x, row.reader.elements_of(block), exponential, x, 0);
    }
  }

  // Lists the tokens that do not rank behind the border, with their weights, in workspace.kept. Returns how many they are;
  // 0 if they are too many for a list.
  u32 list_kept(const SampleRow& row, u64 border, float m, SampleWorkspace& workspace) const {
    u64* const list = room_for(workspace.candidates, kMostListed);
    u32 size = 0;
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = row.reader.elements_of(block);
      const float* const x = row.reader.load(block, workspace.buffer);
      if (kernels.append_candidates(x, 0, n, block * kBlock, logit_of(border), list, &size, kMostListed) < n) return 0;
    }
    size = u32(std::remove_if(list, list + size, [=](u64 each) { return each < border; }) - list);
    float* const values = room_for(workspace.values, size);
    for (u32 i = 0; i < size; ++i) values[i] = logit_of(list[i]);
    const float* const weights = weigh(row, size, m, workspace);
    workspace.kept.resize(size);
    for (u32 i = 0; i < size; ++i)
      workspace.kept[i] = {index_of(list[i]), key_of(list[i]) != kNegativeInfinityKey, weights[i]};
    return size;
  }

 private:
  // At least one token is kept, also by a top_p of 0.
  static double aim_of_top_p(const SampleRow& row, double total) {
    return std::max(row.top_p * total, std::numeric_limits<double>::min());
  }

  // Where the border of top-p should be: the tokens behind it weigh `rest`. A sample of the row says, within bounds, how
  // much the tokens below a logit weigh.
  Band estimated_band(const SampleRow& row, double rest, float m, SampleWorkspace& workspace) const {
    const u32 of_block = std::max(kSampledOfBlock, std::min(kBlock, kSampled / row.reader.blocks()));
    float* const values = room_for(workspace.values, u64(row.reader.blocks()) * of_block);
    u32 count = 0;
    for (u32 block = 0; block < row.reader.blocks(); ++block) {
      const u32 n = std::min(row.reader.elements_of(block), of_block);
      row.reader.load_first(block, n, values + count);
      count += n;
    }
    const float* const weights = weigh(row, count, m, workspace);
    // All tokens below the last bin weigh far less than the rest.
    const double depth = std::log(1e3 * vocab_size / std::max(rest, 1e-300));
    const float per_logit = float(std::min(kBins / depth * row.temperature.inverse, 1e30));
    fill_bins(values, weights, count, m, per_logit, workspace);
    const std::vector<double>& bins = workspace.bins;
    Band band = {-std::numeric_limits<float>::max(), kInfinity};
    // A token of the sample stands for `each` tokens of the row. No token of a bin weighs more than `greatest`.
    const double each = std::min(double(vocab_size), double(row.reader.blocks()) * kBlock) / count,
                 growth = std::exp(depth / kBins);
    double sum = 0.0, variance = 0.0, greatest = std::exp(-depth);
    for (u32 bin = kBins; bin-- > 0;) {
      greatest *= growth;
      sum += each * bins[bin];
      variance += each * each * greatest * bins[bin];
      const double far = (sum - rest) * (sum - rest);
      const bool is_sure = far >= kDeviations * kDeviations * variance;
      const float top = m - float(bin) / per_logit;
      if (is_sure && sum <= rest) band.low = top;
      if (is_sure && sum > rest && bin) {
        band.end = top;
        break;
      }
    }
    return band;
  }

  // The weights of the first of the workspace's values.
  const float* weigh(const SampleRow& row, u32 count, float m, SampleWorkspace& workspace) const {
    const float* const values = workspace.values.data();
    float* const weights = room_for(workspace.weights, count);
    kernels.full_rows->exp_terms(values, count, exponential_of(row, m), weights, values, 0);
    return weights;
  }

  // Sums weights [count] by bins of the values, from `top` down, into the workspace. Returns the bin of each.
  static const int* fill_bins(const float* values, const float* weights, u32 count, float top, float per_logit,
                              SampleWorkspace& workspace) {
    std::vector<double>& bins = workspace.bins;
    bins.assign(kBins, 0.0);
    int* const bin_of = room_for(workspace.bin_of, count);
    for (u32 i = 0; i < count; ++i) bin_of[i] = int(std::min(float(kBins - 1), (top - values[i]) * per_logit));
    for (u32 i = 0; i < count; ++i) bins[bin_of[i]] += weights[i];
    return bin_of;
  }

  // The border among the tokens of a bin, given what those above it weigh. least: the border if there are none.
  u64 border_of_bin(const SampleRow& row, double before, double aim, u64 least, float m,
                    SampleWorkspace& workspace) const {
    std::vector<u64>& of_bin = workspace.of_bin;
    std::sort(of_bin.begin(), of_bin.end(), [](u64 a, u64 b) { return a > b; });
    u64 border = least;
    for (const u64 candidate : of_bin) {
      if (before >= aim) break;
      border = candidate;
      before += weight_of(row, logit_of(candidate), m);
    }
    return border;
  }
};

}  // namespace fused_topk::cpu
