// One node of the tree.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "handles.hpp"
#include "page_hashes.hpp"
#include "slot_run.hpp"

namespace aradix {

namespace nb = nanobind;

enum Gate : uint8_t { kOpen = 0, kPassing = 1, kPending = 2, kGranted = 3, kNothingStops = 4 };

// What only the root of a namespace has.
struct Root {
    nb::object name_space;
    std::vector<uint8_t> digest;  // the seed of its page hashes
};

// An edge of tokens that ends at `depth` bytes of key from the root, and its slots. Sizes are in bytes of key. `order`
// is unique and settles ties; `id` changes when the tail is trimmed. A mark that is empty is a null reference.
// What every walk looks at, and changes, comes first: a path is a line of memory a node then, or two.
struct alignas(64) Node {
    Bytes tokens;
    size_t depth = 0;
    int64_t lock_ref = 0;
    int64_t last_access = 0;
    Handle parent = kNone;
    uint8_t gate = kOpen;
    bool detached : 1 = false;
    bool listed : 1 = false;  // in the list of leaves
    bool filed : 1 = false;   // in the index of a user's policy
    bool timed : 1 = false;   // its priority is for a time
    uint8_t of_uses = 0;      // the class of its uses, where the policy looks at that

    int64_t hit_count = 0;
    int64_t past_uses = 0;  // before its tokens were last evicted, as far as that is remembered
    int64_t last_use = 0;   // the last access that was a hit, or the insert
    nb::object ready;
    uint32_t num_children = 0;
    Handle first_child = kNone;
    Handle last_child = kNone;
    Handle next = kNone;  // sibling, or root
    Handle previous = kNone;
    Handle sooner = kNone;  // evicted, in the list of leaves
    Handle later = kNone;
    uint32_t share = 0;  // that its tokens count to

    int64_t id = 0;
    uint64_t order = 0;
    SlotRun slots;
    int64_t created = 0;

    int64_t priority = 0;
    uint64_t page_hash = 0;    // of the first page, by which the parent finds it
    uint64_t fingerprint = 0;  // of the path to its end
    nb::object streams;
    std::unique_ptr<Root> root;
    PageSpans pages;  // where events are recorded: its tokens once more, and their hashes

    int64_t uses() const { return 1 + hit_count + past_uses; }
    size_t begin() const { return depth - tokens.size(); }
};
static_assert(sizeof(Node) == 4 * 64);

// Nodes in order: the children of one, or the roots.
struct Siblings {
    Handle first = kNone;
    Handle last = kNone;
};

}  // namespace aradix
