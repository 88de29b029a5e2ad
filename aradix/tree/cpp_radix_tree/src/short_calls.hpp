// The plain case of the calls of a lease, with all that the shell does around the steps in short_ways.cpp.
#pragma once

#include "slot_of.hpp"
#include "tree.hpp"

namespace aradix {

// What those calls need of one cache. Each says no, and has then changed nothing, where anything is not plain: the cache
// is closed or this is not its loop, somebody waits or watches, a gate stands, others are to have a turn, a rule is
// broken. The methods in Python then do it, and say what is wrong.
class ShortCalls {
public:
    // `parts` by name; aradix.cache.short_calls says what they are.
    explicit ShortCalls(nb::dict parts);

    nb::object new_lease(nb::handle self, nb::handle cache, PyObject *key);
    bool enter(PyObject *hold);
    bool grow(PyObject *hold, PyObject *num_tokens);
    // An InsertResult, or null.
    nb::object publish(PyObject *hold, PyObject *key);
    bool leave(PyObject *hold);
    // A tensor, or null.
    nb::object slots(PyObject *lease, PyObject *hold);
    Hold *plain_hold(PyObject *hold) const {
        return Py_TYPE(hold) == reinterpret_cast<PyTypeObject *>(hold_type_.ptr()) ? nb::inst_ptr<Hold>(hold) : nullptr;
    }
    // Whether nothing is left to do for a lease that is collected.
    bool is_over(PyObject *hold) const;

    int traverse(visitproc visit, void *arg) const;

private:
    bool is_plain() const;
    bool is_at_home() const;
    // Calls.running_task().
    nb::object running_task() const;
    bool is_key(PyObject *key) const {
        return Py_TYPE(key) == reinterpret_cast<PyTypeObject *>(key_type_.ptr()) &&
               key_slots_.item_bytes.number(key) == item_bytes_;
    }
    // Calls.is_turn_over() says no, and does nothing but count: at `listen_from_` it also asks the loop.
    bool has_turn() const {
        int64_t run_length = run_length_.number(calls_.ptr()) + 1;
        return run_length < max_run_ && run_length != listen_from_;
    }
    void take_turn() const { run_length_.add(calls_.ptr(), 1); }
    void count_query(Hold &hold) const;
    void tell_if_low() const;

    // The order of these is that in which they are read from `parts`.
    nb::object calls_, leases_, pool_, pressure_, holds_, growth_, admission_, standing_, listening_;
    nb::object tree_object_, table_object_, clock_, hold_type_, lease_type_, key_type_, insert_result_, no_duplicates_;
    nb::object to_tensor_;
    PyTypeObject *leases_type_, *pool_type_, *pressure_type_;
    Tree *tree_;
    PageTable *table_;
    int held_;
    int64_t item_bytes_, low_slots_, max_run_, listen_from_;
    KeySlots key_slots_;
    LeaseSlots lease_slots_;
    SlotOf plain_, current_, token_, ask_task_, run_length_;
    SlotOf watch_, num_opened_, num_queries_, num_query_tokens_, num_hit_tokens_, num_evicted_, num_resumes_;
    SlotOf num_held_, is_timed_;
    mutable uint64_t home_thread_ = 0, home_context_ = 0;  // where the loop was last asked
};

// Registers the types by which Python calls all this: `ShortMethod` and the coroutine that it gives.
void add_short_methods(nb::module_ &module);

}  // namespace aradix
