#include "reuse.hpp"

#include <cstdlib>
#include <cstring>

namespace aradix {
namespace {

constexpr int64_t kOldEpochs = 32, kYoungEpochs = 10;
constexpr int kDecay = 9;
constexpr int64_t kClear = 32, kSmall = 64, kSampleEpochs = 4, kSure = 6;
constexpr int64_t kWhole = 256;
constexpr int64_t kMost = int64_t{1} << 24;  // a score in parts of the capacity, so that its square stays small
constexpr int64_t kSlowness = 32;            // the capacity falls by one part in so many in an epoch
constexpr int64_t kMemory = 6;      // evicted tokens that are remembered, in capacities
// What is remembered together is at most so many pages, or tokens if that is more.
constexpr int64_t kChunkPages = 8, kChunkTokens = 512;

// What uses add to twice the epoch of the last one, for each candidate stay: the sum is a level of the table.
constexpr auto kCredits = [] {
    std::array<std::array<int64_t, ReuseRecord::kRungs>, ReuseRecord::kClasses> credits{};
    for (int of_uses = 0; of_uses < ReuseRecord::kClasses; ++of_uses)
        for (int rung = 1; rung < ReuseRecord::kRungs; ++rung)
            credits[of_uses][rung] = use_credit(of_uses) << (rung - 1);
    return credits;
}();

// Keys of the words of a path: these again and again, times a factor that differs from one time round to the next.
constexpr size_t kNumKeys = 128;
constexpr uint64_t kMixer = 0xd6e8feb86659fd93;

constexpr uint64_t mixed(uint64_t number) {
    number *= kMixer;
    number ^= number >> 32;
    number *= kMixer;
    return number ^ number >> 29;
}

constexpr std::array<uint32_t, kNumKeys> kKeys = [] {
    std::array<uint32_t, kNumKeys> keys{};
    for (size_t number = 0; number < kNumKeys; ++number)
        keys[number] = static_cast<uint32_t>(mixed(number + 1) >> 32) | 1;
    return keys;
}();

// Additions in any order, so that the compiler makes several at once.
inline __attribute__((always_inline)) uint64_t sum_of(const uint8_t *tokens, const uint32_t *keys, size_t count) {
    uint64_t sum = 0;
    for (size_t index = 0; index < count; ++index) {
        uint32_t word;
        std::memcpy(&word, tokens + index * sizeof word, sizeof word);
        sum += static_cast<uint64_t>(word) * keys[index];
    }
    return sum;
}

using Sum = uint64_t (*)(const uint8_t *tokens, const uint32_t *keys, size_t count);

uint64_t sum_portably(const uint8_t *tokens, const uint32_t *keys, size_t count) { return sum_of(tokens, keys, count); }

#if defined(__x86_64__) && defined(__GNUC__)

__attribute__((target("avx2"))) uint64_t sum_by_avx2(const uint8_t *tokens, const uint32_t *keys, size_t count) {
    return sum_of(tokens, keys, count);
}

const Sum kFastestSum = (__builtin_cpu_init(), __builtin_cpu_supports("avx2")) ? sum_by_avx2 : sum_portably;

#else

const Sum kFastestSum = sum_portably;

#endif

// The sum of all words, each times the key of its place, of tokens that lie from byte `start` of a path on.
uint64_t fingerprint(const uint8_t *tokens, size_t size, size_t start) {
    uint64_t sum = 0;
    size_t place = start / sizeof(uint32_t), left = size / sizeof(uint32_t);
    while (left != 0) {
        size_t first = place % kNumKeys, count = std::min(kNumKeys - first, left);
        sum += kFastestSum(tokens, kKeys.data() + first, count) * (mixed(place / kNumKeys) | 1);
        tokens += count * sizeof(uint32_t);
        place += count;
        left -= count;
    }
    return sum;
}

// Division and remainder that round down, as Python's do.
int64_t floor_div(int64_t value, int64_t by) {
    int64_t quotient = value / by;
    return quotient - (value % by != 0 && (value < 0) != (by < 0));
}

}  // namespace

ReuseRecord::ReuseRecord(size_t page_size, size_t item_bytes) : page_size_(page_size), item_bytes_(item_bytes) {}

// ---- what happens to nodes ----

void ReuseRecord::hit(Node &node, int64_t num_hits, int64_t tick) {
    if (num_hits == 0 || node.detached || node.parent == kNone)
        return;
    int64_t num_tokens = tokens_in(node.tokens.size());
    score(num_tokens, node.of_uses, node.last_use);
    add(-num_tokens, node.of_uses, node.last_use);
    node.last_use = tick;
    node.of_uses = static_cast<uint8_t>(use_class(node.uses() + num_hits));
    add(num_tokens, node.of_uses, tick);
}

// Two neighbours become one, which was last used when the later used of them was.
void ReuseRecord::merge(Node &parent, Node &child) {
    if (parent.last_use == child.last_use)
        return;
    Node &older = parent.last_use < child.last_use ? parent : child;
    Node &newer = parent.last_use < child.last_use ? child : parent;
    int64_t num_tokens = tokens_in(older.tokens.size());
    add(-num_tokens, older.of_uses, older.last_use);
    older.last_use = newer.last_use;
    add(num_tokens, older.of_uses, older.last_use);
}

const std::vector<ReuseRecord::Run> &ReuseRecord::welcome(Node &leaf, const uint8_t *tokens, uint64_t base,
                                                          int64_t tick) {
    leaf.last_access = leaf.last_use = tick;
    const size_t page_bytes = page_size_ * item_bytes_, begin = leaf.begin();
    const int64_t total = tokens_in(leaf.tokens.size());
    runs_.clear();
    uint64_t print = base;
    int64_t done = 0;
    while (done < total) {
        size_t at = static_cast<size_t>(done) * item_bytes_;
        uint64_t page = fingerprint(tokens + at, page_bytes, begin + at);
        int64_t count = total - done, uses = 0;
        if (Handle known = find_ghost(print + page); known != kNone) {
            Ghost ghost = forget(known);
            count = std::min(count, ghost.num_tokens);
            uses = ghost.uses;
            score(count, use_class(uses), ghost.last_use);
        }
        int of_uses = use_class(leaf.uses() + uses);
        add(count, of_uses, tick);
        size_t rest = at + page_bytes;
        print += page + fingerprint(tokens + rest, static_cast<size_t>(count) * item_bytes_ - page_bytes, begin + rest);
        done += count;
        if (!runs_.empty() && use_class(leaf.uses() + runs_.back().uses) == of_uses) {
            // What would be merged at once is not split.
            Run &last = runs_.back();
            last = Run{last.num_tokens + count, std::min(last.uses, uses), print};
        } else {
            runs_.push_back({count, uses, print});
        }
    }
    leaf.fingerprint = print;
    return runs_;
}

void ReuseRecord::leave(Node &node, int64_t count, uint64_t above) {
    const size_t page_bytes = page_size_ * item_bytes_;
    const auto page_size = static_cast<int64_t>(page_size_);
    const uint8_t *end = node.tokens.data() + node.tokens.size();
    size_t depth = node.depth;
    const int64_t chunk_pages = std::max(kChunkPages, kChunkTokens / page_size);
    for (int64_t left = count / page_size; left > 0;) {
        int64_t pages = (left - 1) % chunk_pages + 1;
        size_t size = static_cast<size_t>(pages) * page_bytes;
        end -= size;
        depth -= size;
        uint64_t page = fingerprint(end, page_bytes, depth);
        // What goes was mostly not looked at for long, and to fetch it from memory would cost more than to add it up.
        if (end == node.tokens.data())
            node.fingerprint = above;
        else
            node.fingerprint -= page + fingerprint(end + page_bytes, size - page_bytes, depth + page_bytes);
        uint64_t key = node.fingerprint + page;
        if (Handle known = find_ghost(key); known != kNone)
            forget(known);
        remember(key, pages * page_size, node);
        left -= pages;
    }
    while (ghost_tokens_ > kMemory * capacity_)
        forget(oldest_);
}

void ReuseRecord::drop(const Node &node) {
    if (node.parent != kNone)
        add(-tokens_in(node.tokens.size()), node.of_uses, node.last_use);
}

void ReuseRecord::split(Node &head, const Node &tail, uint64_t above) const {
    if (head.tokens.size() <= tail.tokens.size())
        head.fingerprint = above + fingerprint(head.tokens.data(), head.tokens.size(), head.begin());
    else
        head.fingerprint = tail.fingerprint - fingerprint(tail.tokens.data(), tail.tokens.size(), head.depth);
}

bool ReuseRecord::advance(int64_t tick) {
    if (epoch_of(tick) == epoch_) {
        if (capacity_ != 0 && newly_held_by_all_ > slack_)
            make_room();
        return false;
    }
    int64_t before = stay();
    tell_all();
    epoch_ = epoch_of(tick);
    clear_oldest();
    note_gains();
    for (int64_t &found : found_)
        found -= found >> kDecay;
    if (capacity_ != 0) {
        settle_all();
        int64_t age = epoch_ - floor_div(cuts_[0], 2);
        if (age > kOldEpochs)
            widen();
        else if (age < kYoungEpochs && shift_ > kMinShift)
            narrow(tick);
        choose();
    } else if (epoch_ > kEpochs / 2) {
        widen();  // nothing went yet: all that there is stays in the table
    }
    for (int rung = 1; rung < kRungs; ++rung)
        leads_[rung] = found_[rung] - found_[0];
    find_bounds();
    find_slack();
    return stay() != before;
}

void ReuseRecord::note_capacity(int64_t num_tokens) {
    int64_t before = capacity_;
    if (num_tokens >= capacity_) {
        capacity_ = num_tokens;
    } else if (num_tokens != 0 && lowered_ != epoch_) {
        lowered_ = epoch_;
        capacity_ = std::max(num_tokens, capacity_ - (capacity_ + kSlowness - 1) / kSlowness);
    }
    slack_ += capacity_ - before;
}

// ---- what was evicted ----

Handle ReuseRecord::find_ghost(uint64_t key) const {
    return by_key_.find(hash_of(key), [&](Handle ghost) { return ghosts_[ghost].key == key; });
}

void ReuseRecord::remember(uint64_t key, int64_t num_tokens, const Node &node) {
    Handle handle = ghosts_.make();
    ghosts_[handle] = Ghost{key, num_tokens, node.uses(), node.last_use, newest_, kNone};
    (newest_ == kNone ? oldest_ : ghosts_[newest_].next) = handle;
    newest_ = handle;
    by_key_.insert(hash_of(key), handle);
    ghost_tokens_ += num_tokens;
}

ReuseRecord::Ghost ReuseRecord::forget(Handle handle) {
    Ghost ghost = ghosts_[handle];
    (ghost.previous == kNone ? oldest_ : ghosts_[ghost.previous].next) = ghost.next;
    (ghost.next == kNone ? newest_ : ghosts_[ghost.next].previous) = ghost.previous;
    by_key_.erase(hash_of(ghost.key), handle);
    ghosts_.free(handle);
    ghost_tokens_ -= ghost.num_tokens;
    add(-ghost.num_tokens, use_class(ghost.uses), ghost.last_use);
    return ghost;
}

// ---- the table ----

void ReuseRecord::add(int64_t num_tokens, int of_uses, int64_t last_use) {
    if (last_use < horizon_)
        return;
    int64_t epoch = epoch_of(last_use), level = 2 * epoch;
    table_[place(epoch)][of_uses] += num_tokens;
    if (level >= held_by_all_[of_uses]) {
        newly_held_by_all_ += num_tokens;
    } else if (level >= held_by_none_[of_uses]) {
        for (int rung = 0; rung < kRungs; ++rung)
            held_[rung] += level + kCredits[of_uses][rung] >= cuts_[rung] ? num_tokens : 0;
        slack_ -= std::max<int64_t>(0, num_tokens);
    }
}

int64_t ReuseRecord::tokens_at(int64_t wanted, int rung) const {
    int64_t total = 0;
    if (rung != 1 && (wanted & 1) != 0)
        return total;  // all other stays are even
    int64_t oldest = 2 * (epoch_ - kEpochs + 1), newest = 2 * epoch_;
    for (int of_uses = 0; of_uses < kClasses; ++of_uses) {
        int64_t twice = wanted - kCredits[of_uses][rung];
        if (twice < oldest)
            break;
        if ((twice & 1) == 0 && twice <= newest)
            total += table_[place(twice >> 1)][of_uses];
    }
    return total;
}

void ReuseRecord::clear_oldest() {
    int64_t epoch = epoch_ - kEpochs;
    horizon_ = std::max(horizon_, (epoch + 1) * (int64_t{1} << shift_));
    for (int of_uses = 0; of_uses < kClasses; ++of_uses) {
        int64_t num_tokens = std::exchange(table_[place(epoch)][of_uses], 0);
        if (num_tokens == 0)
            continue;
        for (int rung = 0; rung < kRungs; ++rung)
            if (2 * epoch + kCredits[of_uses][rung] >= cuts_[rung])
                held_[rung] -= num_tokens;
    }
}

void ReuseRecord::settle_all() {
    for (int rung = 0; rung < kRungs; ++rung)
        settle(rung);
}

void ReuseRecord::settle(int rung) {
    int64_t cut = std::max(cuts_[rung], 2 * (epoch_ - kEpochs + 1));
    int64_t top = 2 * epoch_ + kCredits[kClasses - 1][rung];
    int64_t below = held_[rung] > capacity_ && cut <= top ? 0 : tokens_at(cut - 1, rung);
    while (held_[rung] > capacity_ && cut <= top) {
        below = tokens_at(cut, rung);
        held_[rung] -= below;
        ++cut;
    }
    cuts_[rung] = cut;
    below_[rung] = below;
}

// How much of the level below its cut a candidate holds, of `kWhole`.
int64_t ReuseRecord::part(int rung) const {
    int64_t free = std::max<int64_t>(0, capacity_ - held_[rung] - newly_held_by_all_);
    return below_[rung] > 0 ? std::min(kWhole, free * kWhole / below_[rung]) : 0;
}

void ReuseRecord::recount() {
    held_.fill(0);
    for (int64_t epoch = first_epoch(); epoch <= epoch_; ++epoch)
        for (int of_uses = 0; of_uses < kClasses; ++of_uses) {
            int64_t num_tokens = table_[place(epoch)][of_uses];
            for (int rung = 0; num_tokens != 0 && rung < kRungs; ++rung)
                if (2 * epoch + kCredits[of_uses][rung] >= cuts_[rung])
                    held_[rung] += num_tokens;
        }
}

void ReuseRecord::widen() {
    Table wider{};
    for (int64_t epoch = first_epoch(); epoch <= epoch_; ++epoch)
        for (int of_uses = 0; of_uses < kClasses; ++of_uses)
            wider[place(epoch >> 1)][of_uses] += table_[place(epoch)][of_uses];
    table_ = wider;
    epoch_ >>= 1;
    ++shift_;
    for (int64_t *of_rungs : {found_.data(), gains_.data(), squares_.data(), cuts_.data()})
        std::copy(of_rungs + 2, of_rungs + kRungs, of_rungs + 1);
    for (int64_t &cut : cuts_)
        cut >>= 1;
    rung_ -= rung_ > 1;
    recount();
    if (capacity_ != 0)
        settle_all();
}

void ReuseRecord::narrow(int64_t tick) {
    int64_t wide_epoch = epoch_;
    --shift_;
    epoch_ = epoch_of(tick);
    horizon_ = std::max(horizon_, (epoch_ - kEpochs + 1) * (int64_t{1} << shift_));
    Table narrower{};
    for (int64_t epoch = first_epoch(); epoch <= epoch_; ++epoch) {
        if (epoch >> 1 <= wide_epoch - kEpochs)
            continue;
        for (int of_uses = 0; of_uses < kClasses; ++of_uses) {
            int64_t num_tokens = table_[place(epoch >> 1)][of_uses], half = floor_div(num_tokens, 2);
            narrower[place(epoch)][of_uses] = (epoch & 1) != 0 ? half : num_tokens - half;
        }
    }
    table_ = narrower;
    for (int64_t *of_rungs : {found_.data(), gains_.data(), squares_.data(), cuts_.data()})
        std::copy_backward(of_rungs + 1, of_rungs + kRungs - 1, of_rungs + kRungs);
    for (int64_t &cut : cuts_)
        cut *= 2;
    rung_ += 0 < rung_ && rung_ < kRungs - 1;
    recount();
    settle_all();
}

// ---- candidates ----

void ReuseRecord::score(int64_t num_tokens, int of_uses, int64_t last_use) {
    int64_t level = 2 * epoch_of(last_use);
    bool is_known = last_use >= horizon_;
    if (is_known && level >= held_by_all_[of_uses]) {
        found_by_all_ += num_tokens * kWhole;
        return;
    }
    if (!is_known || level < held_by_none_[of_uses])
        return;
    for (int rung = 0; rung < kRungs; ++rung) {
        int64_t above = level + kCredits[of_uses][rung] - cuts_[rung];
        found_[rung] += num_tokens * (above >= 0 ? kWhole : above == -1 ? part(rung) : 0);
    }
}

void ReuseRecord::tell_all() {
    for (int64_t &found : found_)
        found += found_by_all_;
    for (int64_t &held : held_)
        held += newly_held_by_all_;
    found_by_all_ = newly_held_by_all_ = 0;
}

void ReuseRecord::make_room() {
    tell_all();
    for (int rung = 0; rung < kRungs; ++rung) {
        if (held_[rung] <= capacity_)
            continue;
        settle(rung);
        for (int of_uses = 0; of_uses < kClasses; ++of_uses)
            held_by_all_[of_uses] = std::max(held_by_all_[of_uses], cuts_[rung] - kCredits[of_uses][rung]);
    }
    find_slack();
}

void ReuseRecord::find_slack() {
    slack_ = capacity_ - *std::max_element(held_.begin(), held_.end());
}

void ReuseRecord::find_bounds() {
    for (int of_uses = 0; of_uses < kClasses; ++of_uses) {
        int64_t lowest = INT64_MAX, highest = INT64_MIN;
        for (int rung = 0; rung < kRungs; ++rung) {
            int64_t bound = cuts_[rung] - kCredits[of_uses][rung];
            lowest = std::min(lowest, bound);
            highest = std::max(highest, bound);
        }
        held_by_all_[of_uses] = highest;
        held_by_none_[of_uses] = lowest - 1;
    }
}

void ReuseRecord::note_gains() {
    for (int rung = 1; rung < kRungs; ++rung)
        gains_[rung] += found_[rung] - found_[0] - leads_[rung];
    if (capacity_ == 0 || epoch_ % kSampleEpochs != 0)
        return;
    for (int rung = 1; rung < kRungs; ++rung) {
        int64_t gain = in_capacities(std::exchange(gains_[rung], 0));
        squares_[rung] -= squares_[rung] * kSampleEpochs >> kDecay;
        squares_[rung] += gain * gain;
    }
}

int64_t ReuseRecord::in_capacities(int64_t score) const {
    return std::clamp(floor_div(score * kWhole, capacity_), -kMost, kMost);
}

bool ReuseRecord::is_sure(int rung) const {
    int64_t lead = found_[rung] - found_[0], in_parts = in_capacities(lead);
    if (lead * kSmall <= found_[0])
        return false;
    return lead * kClear > found_[0] || in_parts * in_parts > kSure * squares_[rung];
}

void ReuseRecord::choose() {
    int best = 0;
    for (int rung = 1; rung < kRungs; ++rung) {
        bool is_near = rung_ != 0 && std::abs(rung - rung_) <= 1;
        if (found_[rung] > found_[best] && (is_near || is_sure(rung)))
            best = rung;
    }
    rung_ += (best > rung_) - (best < rung_);
}

}  // namespace aradix
