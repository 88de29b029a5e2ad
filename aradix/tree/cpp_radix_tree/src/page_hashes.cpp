#include "page_hashes.hpp"

#include <Python.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace aradix {
namespace {

// Pages that a run gets room for beyond what it begins with, at most.
constexpr uint32_t kMostRoom = 1024;
// What is smaller is not copied to save memory.
constexpr uint32_t kSmallRun = 16;
// So many spans are not worth a copy.
constexpr size_t kFewSpans = 4;
// Pages hashed at a time, so that the tree's thread never waits for long.
constexpr uint32_t kHashedAtATime = 64;

}  // namespace

// ---- references ----

RunRef::RunRef(PageRun *run) : run_(run) {
    if (run_ != nullptr)
        run_->num_refs_.fetch_add(1, std::memory_order_relaxed);
}

// Runs that nobody hashed refer to those before them, in chains too long for a destructor that calls itself.
void PageRun::let_go(PageRun *run) {
    while (run != nullptr && run->num_refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        PageRun *before = std::exchange(run->start_.run.run_, nullptr);
        run->~PageRun();
        PyMem_RawFree(run);
        run = before;
    }
}

// ---- runs ----

RunRef PageRun::make(ChainStart start, size_t page_bytes, uint32_t capacity) {
    void *block = PyMem_RawMalloc(sizeof(PageRun) + capacity * page_bytes);
    if (block == nullptr)
        throw std::bad_alloc();
    return RunRef(new (block) PageRun(std::move(start), page_bytes, capacity));
}

PageRun::~PageRun() { PyMem_RawFree(digests_); }

Digest *PageRun::new_digests() const {
    void *block = PyMem_RawMalloc(capacity_ * sizeof(Digest));
    if (block == nullptr)
        throw std::bad_alloc();
    return static_cast<Digest *>(block);
}

RunRef PageRun::part(uint32_t first, uint32_t count, uint32_t capacity) {
    ChainStart start;
    if (first == 0) {
        start = this->start();
    } else if (first <= num_hashed()) {
        start.size = sizeof(Digest);
        start.seed = digest(first - 1);
    } else {
        start.run = RunRef(this);
        start.page = first - 1;
    }
    RunRef made = make(std::move(start), page_bytes_, capacity);
    made->append(*this, first, count);
    return made;
}

void PageRun::append(const uint8_t *tokens, uint32_t num_pages) {
    std::memcpy(pages() + count_ * page_bytes_, tokens, num_pages * page_bytes_);
    count_ += num_pages;
}

void PageRun::append(const PageRun &other, uint32_t first, uint32_t num_pages) {
    uint32_t before = count_, hashed = std::min(other.num_hashed(), first + num_pages);
    append(other.page(first), num_pages);
    if (num_hashed() == before && hashed > first) {
        if (digests_ == nullptr)
            digests_ = new_digests();
        std::copy(other.digests_ + first, other.digests_ + hashed, digests_ + before);
        num_hashed_.store(before + hashed - first, std::memory_order_release);
    }
}

ChainStart PageRun::start() {
    std::lock_guard lock(hashing_);
    return start_;
}

void PageRun::hash(uint32_t count) {
    if (count <= num_hashed())
        return;
    // All that is not hashed on the way here, the nearest first.
    std::vector<std::pair<RunRef, uint32_t>> missing;
    for (RunRef run(this); run && run->num_hashed() < count;) {
        ChainStart start = run->start();
        missing.emplace_back(std::move(run), count);
        run = std::move(start.run);
        count = start.page + 1;
    }
    for (auto each = missing.rbegin(); each != missing.rend(); ++each)
        each->first->hash_own(each->second);
}

void PageRun::hash_own(uint32_t count) {
    // To allocate may take the interpreter's lock, so it is done before `hashing_` is taken.
    Digest *spare = num_hashed() == 0 ? new_digests() : nullptr;
    while (num_hashed() < count)
        spare = hash_some(count, spare);
    PyMem_RawFree(spare);
}

// What it needs not of the memory for digests, it gives back.
Digest *PageRun::hash_some(uint32_t count, Digest *spare) {
    RunRef before;  // let go of when nothing is locked any more
    std::lock_guard lock(hashing_);
    if (digests_ == nullptr)
        digests_ = std::exchange(spare, nullptr);
    if (start_.run) {
        start_.seed = start_.run->digest(start_.page);
        start_.size = sizeof(Digest);
        before = std::move(start_.run);
    }
    uint32_t index = num_hashed(), end = std::min(count, index + kHashedAtATime);
    if (index < end) {
        if (index == 0) {
            digests_[0] = sha256(start_.seed.data(), start_.size, page(0), page_bytes_);
            ++index;
        }
        sha256_chain(digests_[index - 1], page(index), page_bytes_, end - index, digests_ + index);
        num_hashed_.store(end, std::memory_order_release);
    }
    return spare;
}

const Digest *PageRun::digest_before(uint32_t index) const {
    if (index != 0)
        return &digest(index - 1);
    return start_.at_root ? nullptr : &start_.seed;
}

// ---- spans ----

PageSpans::PageSpans(const PageSpans &before, const std::vector<uint8_t> &root_digest, const uint8_t *tokens,
                     size_t size, size_t page_bytes) {
    auto num_pages = static_cast<uint32_t>(size / page_bytes);
    uint32_t capacity = num_pages;
    ChainStart start;
    if (before.empty()) {
        start.at_root = true;
        start.size = static_cast<uint8_t>(root_digest.size());
        std::copy(root_digest.begin(), root_digest.end(), start.seed.begin());
    } else {
        const PageSpan &last = before.spans().back();
        if (last.end() == last.run->count()) {
            if (last.run->capacity() - last.run->count() >= num_pages) {
                last.run->append(tokens, num_pages);
                only_ = PageSpan{last.run, last.end(), num_pages};
                return;
            }
            // A context that grows: as it does, so does the room, and it comes to few runs.
            if (last.run->is_first_behind())
                capacity += std::min(last.run->capacity(), kMostRoom);
        }
        start.run = last.run;
        start.page = last.end() - 1;
    }
    only_ = PageSpan{PageRun::make(std::move(start), page_bytes, capacity), 0, num_pages};
    only_.run->append(tokens, num_pages);
}

size_t PageSpans::num_pages() const {
    size_t sum = 0;
    for (const PageSpan &span : spans())
        sum += span.count;
    return sum;
}

void PageSpans::add(PageSpan span) {
    if (empty()) {
        only_ = std::move(span);
        return;
    }
    PageSpan &last = several_ ? several_->back() : only_;
    if (last.run == span.run && last.end() == span.first) {
        last.count += span.count;
        return;
    }
    if (!several_) {
        several_ = std::make_unique<Several>();
        several_->push_back(std::exchange(only_, PageSpan()));
    }
    several_->push_back(std::move(span));
}

PageSpans PageSpans::split_front(size_t num_pages) {
    PageSpans head, tail;
    for (const PageSpan &span : spans()) {
        auto taken = static_cast<uint32_t>(std::min<size_t>(num_pages, span.count));
        num_pages -= taken;
        PageSpan before{span.run, span.first, taken}, behind{span.run, span.first + taken, span.count - taken};
        if (before.count != 0 && behind.count != 0) {
            // The smaller part gets a run of its own, so that neither keeps much of what may be gone with the other.
            PageSpan &smaller = before.count <= behind.count ? before : behind;
            smaller = PageSpan{smaller.run->part(smaller.first, smaller.count, smaller.count), 0, smaller.count};
        }
        if (before.count != 0)
            head.add(std::move(before));
        if (behind.count != 0)
            tail.add(std::move(behind));
    }
    *this = std::move(tail);
    return head;
}

PageSpans PageSpans::split_back(size_t num_kept) {
    PageSpans tail;
    std::span<PageSpan> all = changeable();
    size_t index = 0;
    for (; index < all.size() && num_kept >= all[index].count; ++index)
        num_kept -= all[index].count;
    const size_t num_whole = index;
    if (index < all.size() && num_kept != 0) {
        PageSpan &cut = all[index++];
        auto kept = static_cast<uint32_t>(num_kept);
        tail.add(PageSpan{cut.run, cut.first + kept, cut.count - kept});
        bool wasteful = kept < cut.run->capacity() / 2 && cut.run->capacity() > kSmallRun;
        if (wasteful)
            cut = PageSpan{cut.run->part(cut.first, kept, kept), 0, kept};
        else
            cut.count = kept;
    }
    for (PageSpan &gone : all.subspan(index))
        tail.add(std::move(gone));
    if (several_)
        several_->resize(num_whole + (num_kept != 0));
    else if (num_whole + (num_kept != 0) == 0)
        only_ = PageSpan();
    return tail;
}

void PageSpans::join_front(PageSpans &&head) {
    PageSpans joined(std::move(head));
    for (PageSpan &span : changeable())
        joined.add(std::move(span));
    *this = std::move(joined);
    if (spans().size() > kFewSpans)
        tidy();
}

// Put small spans together until each is more than twice as long as the next: then there are few, and a page was
// copied few times.
void PageSpans::tidy() {
    struct Group {
        size_t first, size;
        uint32_t num_pages;
    };
    std::vector<Group> groups;
    for (const PageSpan &span : *several_) {
        groups.push_back(Group{static_cast<size_t>(&span - several_->data()), 1, span.count});
        while (groups.size() > 1 && groups[groups.size() - 2].num_pages <= 2 * groups.back().num_pages) {
            Group last = groups.back();
            groups.pop_back();
            groups.back().size += last.size;
            groups.back().num_pages += last.num_pages;
        }
    }
    PageSpans tidied;
    for (const Group &group : groups) {
        auto grouped = spans().subspan(group.first, group.size);
        tidied.add(group.size == 1 ? grouped.front() : joined(grouped, group.num_pages));
    }
    *this = std::move(tidied);
}

PageSpan PageSpans::joined(std::span<const PageSpan> spans, uint32_t count) {
    RunRef run = spans.front().run->part(spans.front().first, spans.front().count, count);
    for (const PageSpan &span : spans.subspan(1))
        run->append(*span.run, span.first, span.count);
    return PageSpan{std::move(run), 0, count};
}

void PageSpans::hash() const {
    for (const PageSpan &span : spans())
        span.run->hash(span.end());
}

void PageSpans::copy_digests(uint8_t *out) const {
    for (const PageSpan &span : spans()) {
        size_t size = span.count * sizeof(Digest);
        std::memcpy(out, span.run->digest(span.first).data(), size);
        out += size;
    }
}

}  // namespace aradix
