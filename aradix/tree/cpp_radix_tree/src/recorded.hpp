// The events of a tree, as they are recorded and as Python sees them.
#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "page_hashes.hpp"
#include "python_records.hpp"

namespace aradix {

// Pages that became matchable, pages that are gone, and a flush of everything. To record one asks nothing of Python, so
// that nothing comes in in the middle of a step.
struct Stored {
    PageSpans pages;
    nb::object name_space;
};
struct Removed {
    PageSpans pages;
};
struct Cleared {};
using Event = std::variant<Stored, Removed, Cleared>;
using EventLog = std::vector<Event>;

// A sequence of events that were recorded one after the other. Hashes are computed, and records made, when somebody
// first looks at one, on the thread that does. On another than the tree's the hashes take none of the interpreter's
// time; the tree's own thread keeps its lock, which others would not give back soon.
class RecordedEvents {
public:
    RecordedEvents(const Records &records, size_t page_size, size_t item_bytes,
                   std::shared_ptr<const EventLog> log);

    size_t size() const { return size_; }
    // All of them, in a list that is made once.
    nb::object list();

    int traverse(visitproc visit, void *arg);
    void clear();

private:
    nb::object record(const Event &event) const;

    nb::object stored_, removed_, cleared_;
    size_t page_size_, item_bytes_, size_;
    unsigned long thread_;
    std::shared_ptr<const EventLog> log_;
    nb::object list_;
};

// Registers the type, as a sequence.
void add_recorded_events(nb::module_ &module);

}  // namespace aradix
