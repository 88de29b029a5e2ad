// Who may keep how much: the tenants by how far they are above their share.
#pragma once

#include <memory>

#include "leaf_heap.hpp"
#include "python_records.hpp"

namespace aradix {

// What one tenant has a claim on, and what it has, in tokens.
struct Share {
    nb::object tenant;
    int64_t claim;
    int64_t cached = 0, leased = 0, demand = 0, evicted = 0;
    int64_t num_filed = 0;  // evictable leaves

    int64_t excess() const { return cached + leased + demand - claim; }
};

// The shares of a tree, the last one for every tenant that is not named. Without any nothing is counted.
class Shares {
public:
    Shares(const Records &records, nb::handle shares);

    // Whether anybody has a claim.
    explicit operator bool() const { return !shares_.empty(); }
    // At least one: where nobody has a claim all leaves stand in one index.
    size_t num_indexes() const { return shares_.empty() ? 1 : shares_.size(); }
    uint32_t of(nb::handle name_space) const;
    Share &at(uint32_t share);

    void add_cached(uint32_t share, int64_t count) {
        if (*this)
            change(share, shares_[share].cached, shares_[share].cached + count);
    }
    void add_leased(uint32_t share, int64_t count) { change(share, at(share).leased, at(share).leased + count); }
    void set_demand(uint32_t share, int64_t count) { change(share, at(share).demand, count); }
    void add_filed(uint32_t share, int64_t count) {
        if (*this)
            change(share, shares_[share].num_filed, shares_[share].num_filed + count);
    }
    // The one to give first, which has a leaf to give; kNone if nobody has.
    Handle first() const { return ranked_.least(); }

    nb::list views() const;
    int traverse(visitproc visit, void *arg);
    void clear();

private:
    void change(uint32_t share, int64_t &what, int64_t value);

    const Records &records_;
    std::vector<Share> shares_;
    nb::object by_tenant_;
    Places places_;
    LeafHeap ranked_{places_};
};

}  // namespace aradix
