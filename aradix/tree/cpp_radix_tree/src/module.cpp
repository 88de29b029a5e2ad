// The Python module: names, defaults, and what the garbage collector needs to know.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "copy_line.hpp"
#include "hold.hpp"
#include "msgpack_ints.hpp"
#include "page_table.hpp"
#include "short_calls.hpp"
#include "tokens.hpp"
#include "tree.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL ARADIX_ARRAY_API
#include <numpy/arrayobject.h>

namespace nb = nanobind;
using namespace nb::literals;
using aradix::Hold;
using aradix::NodeStats;
using aradix::PageTable;
using aradix::Policy;
using aradix::ShortCalls;
using aradix::Tree;

namespace {

Policy policy_named(const std::string &name) {
    constexpr const char *kNames[] = {"lru", "mru", "fifo", "filo", "lfu", "slru", "priority", "tenure", "user"};
    for (int policy = 0; policy <= static_cast<int>(Policy::user); ++policy)
        if (name == kNames[policy])
            return static_cast<Policy>(policy);
    throw nb::value_error("no such policy");
}

void make_tree(Tree *tree, size_t page_size, size_t item_bytes, bool whole_nodes, bool record_events,
               bool has_priorities, bool merge, const std::string &policy, int64_t protected_from,
               nb::object user_policy, nb::object state, nb::object indexes, nb::object leaf, nb::object shares) {
    if (page_size == 0 || page_size > (size_t{1} << 32) || (item_bytes != 4 && item_bytes != 8))
        throw nb::value_error("page_size must be at least 1, item_bytes 4 or 8");
    new (tree) Tree(aradix::Settings{page_size, item_bytes, whole_nodes, record_events, has_priorities, merge},
                    policy_named(policy), protected_from, aradix::UserPolicy{user_policy, state, indexes, leaf},
                    shares);
}

int traverse_tree(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Tree>(self)->traverse(visit, arg) : 0;
}

int clear_tree(PyObject *self) {
    if (nb::inst_ready(self))
        nb::inst_ptr<Tree>(self)->clear();
    return 0;
}

int traverse_hold(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Hold>(self)->traverse(visit, arg) : 0;
}

int clear_hold(PyObject *self) {
    if (nb::inst_ready(self))
        nb::inst_ptr<Hold>(self)->clear();
    return 0;
}

PyType_Slot hold_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(traverse_hold)},
                            {Py_tp_clear, reinterpret_cast<void *>(clear_hold)},
                            {0, nullptr}};

PyType_Slot tree_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(traverse_tree)},
                            {Py_tp_clear, reinterpret_cast<void *>(clear_tree)},
                            {0, nullptr}};

int traverse_short_calls(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<ShortCalls>(self)->traverse(visit, arg) : 0;
}

// None to clear: whoever refers to one can be cleared, and it is asked until then.
PyType_Slot short_calls_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(traverse_short_calls)}, {0, nullptr}};

int import_numpy() {
    import_array1(-1);
    return 0;
}

}  // namespace

NB_MODULE(_native, module) {
    if (import_numpy() != 0)
        throw nb::python_error();
    // A tree that is alive when the interpreter ends is no leak worth telling users of.
    nb::set_leak_warnings(false);

#ifdef __SANITIZE_ADDRESS__
    module.attr("sanitized") = true;
#else
    module.attr("sanitized") = false;
#endif

    module.def(
        "sha256",
        [](nb::bytes data, bool portably) {
            aradix::Digest digest =
                aradix::sha256(nullptr, 0, reinterpret_cast<const uint8_t *>(data.c_str()), data.size(), portably);
            return aradix::bytes_of(digest.data(), digest.size());
        },
        "data"_a, nb::kw_only(), "portably"_a);

    module.def(
        "sha256_chain",
        [](nb::bytes before, nb::bytes pages, size_t page_bytes, bool portably) {
            aradix::Digest digest;
            if (before.size() != digest.size() || page_bytes == 0 || pages.size() % page_bytes != 0)
                throw nb::value_error("the digest before whole pages has 32 bytes");
            std::memcpy(digest.data(), before.c_str(), digest.size());
            size_t num_pages = pages.size() / page_bytes;
            std::vector<aradix::Digest> digests(num_pages);
            aradix::sha256_chain(digest, reinterpret_cast<const uint8_t *>(pages.c_str()), page_bytes, num_pages,
                                 digests.data(), portably);
            return aradix::bytes_of(reinterpret_cast<const uint8_t *>(digests.data()), num_pages * sizeof digest);
        },
        "before"_a, "pages"_a, "page_bytes"_a, nb::kw_only(), "portably"_a);

    module.def("msgpack_ids", &aradix::msgpack_ids, "tokens"_a);
    module.def("msgpack_hashes", &aradix::msgpack_hashes, "hashes"_a);
    module.def("pack_tokens", &aradix::pack_tokens, "token_ids"_a.none());

    nb::class_<PageTable>(module, "PageTable")
        .def(nb::init<nb::object, nb::object, int64_t, int>(), "states"_a, "stack"_a, "page_size"_a, "free"_a)
        .def_ro("num_free", &PageTable::num_free)
        .def_ro("num_pages", &PageTable::num_pages)
        .def_rw("quiet", &PageTable::quiet)
        .def_ro("page_size", &PageTable::page_size)
        .def_prop_ro("free_slots", &PageTable::free_slots)
        .def_prop_ro("states", &PageTable::states_array)
        .def_prop_ro("stack", &PageTable::stack_array)
        .def("counts", &PageTable::counts)
        .def("count", &PageTable::count, "state"_a)
        .def("take", &PageTable::take, "num_slots"_a, "state"_a)
        .def("give", &PageTable::give, "slots"_a, "origin"_a)
        .def("pop", &PageTable::pop, "num_pages"_a, "state"_a)
        .def("push", &PageTable::push, "pages"_a, "origin"_a)
        .def("move", &PageTable::move, "pages"_a, "origin"_a, "state"_a)
        .def("claim", &PageTable::claim, "pages"_a, "state"_a);

    nb::class_<Hold>(module, "Hold", nb::type_slots(hold_slots))
        .def(nb::init<int64_t, nb::object, nb::object, int64_t, nb::object, bool, bool, nb::object, nb::object, int64_t,
                      double, int64_t>(),
             "order"_a, "key"_a, "given"_a, "limit"_a, "priority"_a, "store"_a, "resume"_a, "stream"_a.none(),
             "opened_in"_a.none(), "opened_near"_a, "opened_when"_a, "page_size"_a)
        .def_ro("order", &Hold::order)
        .def_ro("limit", &Hold::limit)
        .def_ro("opened_in", &Hold::opened_in)
        .def_ro("opened_near", &Hold::opened_near)
        .def_ro("opened_when", &Hold::opened_when)
        .def_ro("page_size", &Hold::page_size)
        .def_ro("num_opened", &Hold::num_opened)
        .def_ro("priority", &Hold::priority)
        .def_ro("store", &Hold::store)
        .def_ro("resume", &Hold::resume)
        .def_rw("key", &Hold::key)
        .def_rw("given", &Hold::given)
        .def_rw("stream", &Hold::stream, nb::for_setter("value"_a.none()))
        .def_rw("used", &Hold::used, nb::for_setter("value"_a.none()))
        .def_rw("task", &Hold::task, nb::for_setter("value"_a.none()))
        .def_rw("joins", &Hold::joins)
        .def_rw("node_id", &Hold::node_id)
        .def_rw("num_matched", &Hold::num_matched)
        .def_rw("published", &Hold::published)
        .def_rw("committed", &Hold::committed)
        .def_rw("num_own", &Hold::num_own)
        .def_rw("version", &Hold::version)
        .def_rw("opening", &Hold::opening)
        .def_rw("entered", &Hold::entered)
        .def_rw("held", &Hold::held)
        .def_rw("released", &Hold::released)
        .def_rw("counted", &Hold::counted)
        .def_rw("waiting", &Hold::waiting)
        .def_prop_ro("num_tokens", &Hold::num_tokens)
        .def_prop_ro("num_own_slots", &Hold::num_own_slots)
        .def_prop_ro("own", &Hold::own)
        .def("fresh_slots_for", &Hold::fresh_slots_for, "num_tokens"_a)
        .def("add", &Hold::add, "slots"_a, "num_tokens"_a)
        .def("take_front", &Hold::take_front, "num_slots"_a)
        .def("cut", &Hold::cut, "num_own"_a);

    aradix::add_recorded_events(module);

    nb::class_<NodeStats>(module, "NodeStats")
        .def_ro("last_access", &NodeStats::last_access)
        .def_ro("created", &NodeStats::created)
        .def_ro("hit_count", &NodeStats::hit_count)
        .def_ro("uses", &NodeStats::uses)
        .def_ro("priority", &NodeStats::priority)
        .def_ro("num_tokens", &NodeStats::num_tokens);

    nb::class_<Tree>(module, "Tree", nb::type_slots(tree_slots))
        .def("__init__", &make_tree, nb::kw_only(), "page_size"_a, "item_bytes"_a, "whole_nodes"_a, "record_events"_a,
             "has_priorities"_a, "merge"_a, "policy"_a, "protected_from"_a, "user_policy"_a.none(), "state"_a.none(),
             "indexes"_a.none(), "leaf"_a.none(), "shares"_a)
        .def_prop_ro("page_size", [](const Tree &tree) { return tree.page_size(); })
        .def_prop_ro("failure", [](const Tree &tree) { return tree.ranking().failure(); })
        .def_prop_ro("stay", [](const Tree &tree) { return tree.stay(); })
        .def_prop_ro("merges", [](const Tree &tree) { return tree.ranking().merges(); })
        .def_ro("evictable_tokens", &Tree::evictable_tokens)
        .def_ro("protected_tokens", &Tree::protected_tokens)
        .def_ro("detached_tokens", &Tree::detached_tokens)
        .def_ro("num_nodes", &Tree::num_nodes)
        .def_ro("version", &Tree::version)
        .def_prop_rw(
            "on_event", [](const Tree &tree) { return tree.on_event.is_valid() ? tree.on_event : nb::none(); },
            [](Tree &tree, nb::object told) { tree.on_event = told.is_none() ? nb::object() : std::move(told); },
            nb::for_setter(nb::arg("told").none()))
        .def_prop_ro("num_namespaces", [](const Tree &tree) { return tree.num_namespaces(); })
        .def("match", &Tree::match, "key"_a, nb::kw_only(), "limit"_a = nb::none(), "pin"_a = false,
             "past_pending"_a = false)
        .def("peek", &Tree::peek, "key"_a)
        .def("insert", &Tree::insert, "key"_a, "slots"_a, nb::kw_only(), "priority"_a = 0, "ready"_a = nb::tuple(),
             "past_pending"_a = false, "held_hits"_a = 1, "new_hits"_a = 0)
        .def("extend", &Tree::extend, "node_id"_a, "key"_a, "slots"_a, nb::kw_only(), "priority"_a = 0,
             "ready"_a = nb::tuple())
        .def("pin", &Tree::pin, "ref"_a)
        .def("unpin", &Tree::unpin, "node_id"_a, nb::kw_only(), "touch"_a = true)
        .def("record_hit", &Tree::record_hit, "node_id"_a)
        .def("mark_streams", &Tree::mark_streams, "node_id"_a, "streams"_a)
        .def("prioritize", &Tree::prioritize, "node_id"_a, "start"_a, "stop"_a, "priority"_a, "expires"_a)
        .def("decay", &Tree::decay, "now"_a)
        .def("slots_of", &Tree::slots_of, "ref"_a, "start"_a = 0)
        .def("is_detached", &Tree::is_detached, "node_id"_a)
        .def("lock_ref", &Tree::lock_ref, "node_id"_a)
        .def("is_below", &Tree::is_below, "node_id"_a, "ancestor_id"_a)
        .def("evict", &Tree::evict, "num_tokens"_a, nb::kw_only(), "namespace"_a = nb::none(), "demand"_a = 0,
             "only_excess"_a = false)
        .def("share_of", &Tree::share_of, "namespace"_a)
        .def("charge", &Tree::charge, "share"_a, "num_tokens"_a)
        .def("shares", &Tree::shares)
        .def("enter_hold", &Tree::enter_hold, "hold"_a)
        .def(
            "grow_hold",
            [](Tree &tree, Hold &hold, PageTable &table, int64_t num_tokens, int state) -> nb::object {
                auto done = tree.grow_hold(hold, table, num_tokens, state);
                if (!done)
                    return nb::none();
                return nb::make_tuple(done->num_taken, done->num_evicted, done->grew);
            },
            "hold"_a, "table"_a, "num_tokens"_a, "state"_a)
        .def(
            "publish_hold",
            [](Tree &tree, Hold &hold, PageTable &table, nb::handle key, int state) -> nb::object {
                auto done = tree.publish_hold(hold, table, key, state);
                if (!done)
                    return nb::none();
                return nb::make_tuple(done->held, done->end, done->last, done->duplicates);
            },
            "hold"_a, "table"_a, "key"_a, "state"_a)
        .def("leave_hold", &Tree::leave_hold, "hold"_a, "table"_a, "state"_a)
        .def("slots_of_hold", &Tree::slots_of_hold, "hold"_a)
        .def("detach", &Tree::detach, "namespace"_a = nb::none())
        .def("close_gate", &Tree::close_gate, "key"_a)
        .def("set_gate", &Tree::set_gate, "node_id"_a, "gate"_a)
        .def("open_gate", &Tree::open_gate, "node_id"_a)
        .def("pin_below", &Tree::pin_below, "node_id"_a)
        .def("evict_below", &Tree::evict_below, "node_id"_a)
        .def("namespaces", &Tree::namespaces)
        .def("take_events", &Tree::take_events)
        .def("take_recorded", &Tree::take_recorded)
        .def("view", &Tree::view, "node_id"_a)
        .def("child_ids", &Tree::child_ids, "node_id"_a)
        .def_prop_ro("tick", [](const Tree &tree) { return tree.tick(); })
        .def("roots", &Tree::roots)
        .def("glance", &Tree::glance, "node_id"_a, nb::kw_only(), "children"_a = true)
        .def("look", &Tree::look, "key"_a)
        .def("next_victim", &Tree::next_victim)
        .def("walk", &Tree::walk, nb::kw_only(), "detached"_a = false);

    nb::class_<ShortCalls>(module, "ShortCalls", nb::type_slots(short_calls_slots))
        .def(nb::init<nb::dict>(), "parts"_a);
    aradix::add_short_methods(module);
    aradix::add_copy_line(module);
}
