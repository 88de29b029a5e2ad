// Which leaf goes first: the policies, and the index of evictable leaves.
#pragma once

#include "leaf_heap.hpp"
#include "node.hpp"
#include "python_records.hpp"
#include "reuse.hpp"
#include "shares.hpp"

namespace aradix {

// The first four rank by time alone.
enum class Policy { lru, mru, fifo, filo, lfu, slru, priority, tenure, user };

// What a user's policy may look at: a copy, so that nothing it keeps or changes matters to the tree.
struct NodeStats {
    int64_t last_access, created, hit_count, uses, priority, num_tokens;
};

// A policy of a user, and the index that keeps its ranks.
struct UserPolicy {
    nb::object policy;
    nb::object state;  // its method, or none
    nb::object indexes;  // an EvictableIndex of leaves for each share
    nb::object leaf;   // what names a leaf there: a NamedTuple (handle, order)
};

// A user's policy may raise in the middle of a step. The step is finished, and all later ones, by recency.
class Ranking {
public:
    Ranking(const Records &records, Arena<Node> &nodes, Shares &shares, Policy policy, int64_t protected_from,
            UserPolicy user, size_t item_bytes, bool merges);

    // Whether neighbours that became equal are to be merged.
    bool merges() const { return merges_; }
    nb::object failure() const { return failure_.is_valid() ? failure_ : nb::none(); }

    // Put a leaf into the index under its rank of now.
    void file(Handle leaf);
    void discard(Handle leaf);
    bool is_filed(Handle leaf) const {
        const Node &node = nodes_[leaf];
        return node.listed || (policy_ == Policy::user ? node.filed : heaps_[node.share].contains(leaf));
    }
    // The leaf to go first, which stays filed; kNone if there is none.
    Handle least();

    // Under `tenure`: leaves have another stay from now on.
    void set_stay(int64_t stay);

    // Whether nothing that the policy will ever look at tells two nodes apart; after a failure nobody can say.
    bool same_state(Handle first, Handle second) {
        if (policy_ != Policy::tenure)
            return same_otherwise(first, second);
        const Node &one = nodes_[first], &other = nodes_[second];
        return merges_ && one.last_access == other.last_access && one.of_uses == other.of_uses;
    }
    // Whether they differ, where that is seen without asking anybody and without looking further than a walk does.
    bool plainly_differ(const Node &one, const Node &other) const {
        return policy_ == Policy::tenure && (one.of_uses != other.of_uses || one.last_access != other.last_access);
    }
    // What `same_state` compares, as the Python core has it.
    nb::object state(Handle handle);

    int traverse(visitproc visit, void *arg);
    void clear();

private:
    // `same_state` under all policies but `tenure`.
    bool same_otherwise(Handle first, Handle second);
    void failed(nb::python_error &error);
    Rank rank(const Node &node) const;
    nb::object stats(const Node &node) const;
    nb::object user_leaf(Handle leaf) const;
    nb::object user_index(uint32_t share) const { return user_.indexes[share]; }
    bool whole_history() const { return policy_ == Policy::user && user_.state.is_none(); }

    // Leaves from the first to go to the last. Where a policy ranks by nothing but when a node was made or used, a leaf
    // mostly goes to one of the ends when it is filed, and no heap is needed for it; the others stand in the heap. So it
    // is under `tenure` as long as recency is all that counts.
    struct List {
        Handle first = kNone;
        Handle last = kNone;
    };
    bool lists_leaves() const { return policy_ <= Policy::filo || policy_ == Policy::tenure; }
    bool goes_before(Handle first, Handle second) const;
    bool put_at_an_end(List &list, Handle leaf);
    void unlist(Handle leaf);

    const Records &records_;
    Arena<Node> &nodes_;
    Shares &shares_;
    Policy policy_;
    int64_t protected_from_;
    UserPolicy user_;
    size_t item_bytes_;
    bool merges_;
    Places places_;
    std::vector<LeafHeap> heaps_;  // one for each share
    std::vector<List> lists_;      // as well
    int64_t stay_ = 0;
    nb::object failure_;
};

}  // namespace aradix
