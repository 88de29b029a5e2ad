// The chained hashes of pages, computed when somebody first asks for them, on whatever thread that is.
//
// A step of the tree only notes where pages lie; SHA-256 would take longer than all the rest of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "sha256.hpp"

namespace aradix {

class PageRun;

// A counted reference. Whoever hashes may let go of a run on a thread of its own, without the interpreter's lock.
class RunRef {
public:
    RunRef() = default;
    explicit RunRef(PageRun *run);
    RunRef(const RunRef &other) : RunRef(other.run_) {}
    RunRef(RunRef &&other) noexcept : run_(std::exchange(other.run_, nullptr)) {}
    RunRef &operator=(RunRef other) noexcept {
        std::swap(run_, other.run_);
        return *this;
    }
    inline ~RunRef();

    PageRun *operator->() const { return run_; }
    PageRun &operator*() const { return *run_; }
    explicit operator bool() const { return run_ != nullptr; }
    bool operator==(const RunRef &other) const { return run_ == other.run_; }

private:
    friend class PageRun;
    PageRun *run_ = nullptr;
};

// What a chain of hashes begins with.
struct ChainStart {
    RunRef run;  // behind this page of it, as long as its hash is not known
    uint32_t page = 0;
    bool at_root = false;
    uint8_t size = 0;
    Digest seed{};  // the hash of the page before or, at a root, the digest of a namespace, which may be empty
};

// A stretch of pages on one path, and their hashes. Pages are added by the thread of the tree alone, and neither move nor
// change after that, so those that an event speaks of can be read on any thread.
class PageRun {
public:
    // With the interpreter's lock held, as all that allocates.
    static RunRef make(ChainStart start, size_t page_bytes, uint32_t capacity);
    // Some of these pages in a run of their own, with room for so many.
    RunRef part(uint32_t first, uint32_t count, uint32_t capacity);

    size_t page_bytes() const { return page_bytes_; }
    uint32_t capacity() const { return capacity_; }
    uint32_t count() const { return count_; }
    const uint8_t *page(uint32_t index) const { return pages() + index * page_bytes_; }
    void append(const uint8_t *tokens, uint32_t num_pages);
    // With their hashes, as far as these are known.
    void append(const PageRun &other, uint32_t first, uint32_t num_pages);
    // Whether this is the first who goes on behind the last page in a run of his own.
    bool is_first_behind() { return !std::exchange(is_continued_, true); }

    // Compute what is missing of the first `count` hashes. Waits for another thread that is at it.
    void hash(uint32_t count);
    // Of a page that was hashed.
    const Digest &digest(uint32_t index) const { return digests_[index]; }
    // The hash before a page that was hashed, null at a root.
    const Digest *digest_before(uint32_t index) const;

private:
    friend class RunRef;

    PageRun(ChainStart start, size_t page_bytes, uint32_t capacity)
        : start_(std::move(start)), page_bytes_(page_bytes), capacity_(capacity) {}
    ~PageRun();

    uint8_t *pages() const { return reinterpret_cast<uint8_t *>(const_cast<PageRun *>(this) + 1); }
    Digest *new_digests() const;
    uint32_t num_hashed() const { return num_hashed_.load(std::memory_order_acquire); }
    ChainStart start();
    void hash_own(uint32_t count);
    Digest *hash_some(uint32_t count, Digest *spare);
    static void let_go(PageRun *run);

    std::atomic<uint32_t> num_refs_{0};
    std::atomic<uint32_t> num_hashed_{0};
    std::mutex hashing_;
    // Under `hashing_` until a page is hashed, fixed from then on:
    ChainStart start_;
    Digest *digests_ = nullptr;  // with room for all
    const size_t page_bytes_;
    const uint32_t capacity_;
    uint32_t count_ = 0;
    bool is_continued_ = false;
};

RunRef::~RunRef() {
    if (run_ != nullptr)
        PageRun::let_go(run_);
}

struct PageSpan {
    RunRef run;
    uint32_t first = 0, count = 0;

    uint32_t end() const { return first + count; }
};

// The pages of an edge, in order: a few spans, nearly always one.
class PageSpans {
public:
    PageSpans() = default;
    // Pages that follow the last of some others, or a root that has this digest.
    PageSpans(const PageSpans &before, const std::vector<uint8_t> &root_digest, const uint8_t *tokens, size_t size,
              size_t page_bytes);
    PageSpans(PageSpans &&other) noexcept
        : only_(std::exchange(other.only_, PageSpan())), several_(std::move(other.several_)) {}
    PageSpans(const PageSpans &other)
        : only_(other.only_), several_(other.several_ ? std::make_unique<Several>(*other.several_) : nullptr) {}
    PageSpans &operator=(PageSpans other) noexcept {
        std::swap(only_, other.only_);
        std::swap(several_, other.several_);
        return *this;
    }

    bool empty() const { return spans().empty(); }
    size_t num_pages() const;
    std::span<const PageSpan> spans() const {
        return several_ ? std::span<const PageSpan>(*several_) : std::span(&only_, only_.count == 0 ? 0 : 1);
    }
    // Have the processor fetch what letting go of them, or going on behind them, will touch.
    void fetch() const {
        for (const PageSpan &span : spans())
            __builtin_prefetch(&*span.run, 1);
    }

    PageSpans split_front(size_t num_pages);
    // Keeps so many pages, and gives those behind them, to be read and let go of.
    PageSpans split_back(size_t num_kept);
    void join_front(PageSpans &&head);

    void hash() const;
    // The digests, once they are hashed, one after the other.
    void copy_digests(uint8_t *out) const;

private:
    using Several = std::vector<PageSpan>;

    std::span<PageSpan> changeable() {
        return several_ ? std::span<PageSpan>(*several_) : std::span(&only_, only_.count == 0 ? 0 : 1);
    }
    void add(PageSpan span);
    void tidy();
    static PageSpan joined(std::span<const PageSpan> spans, uint32_t count);

    PageSpan only_;
    std::unique_ptr<Several> several_;  // then all of them
};

}  // namespace aradix
