/* cat_schema.c: the catalogue's tables, and the statements on them. */
#include "store/cat_internal.h"

static const char *const create[] = {
    "CREATE TABLE meta(id INTEGER PRIMARY KEY, generation INTEGER, log_first INTEGER, next_node INTEGER, "
    "segment_bytes INTEGER, reserved_bytes INTEGER, n_spaces INTEGER, n_segments INTEGER, n_nodes INTEGER, "
    "n_reservations INTEGER, spaces_sum INTEGER, segments_sum INTEGER, nodes_sum INTEGER, reservations_sum INTEGER, "
    "sum INTEGER)",
    "CREATE TABLE space(id BLOB PRIMARY KEY, created INTEGER, model_name TEXT, sum INTEGER) WITHOUT ROWID",
    "CREATE TABLE segment(id INTEGER PRIMARY KEY, space BLOB, disk_bytes INTEGER, n_tokens INTEGER, sum INTEGER)",
    "CREATE TABLE node(id INTEGER PRIMARY KEY, parent INTEGER, space BLOB, segment INTEGER, segment_first INTEGER, "
    "n_tokens INTEGER, depth INTEGER, flags INTEGER, created INTEGER, sum INTEGER, tokens BLOB)",
    "CREATE TABLE reservation(segment INTEGER PRIMARY KEY, instance INTEGER, bytes INTEGER, sum INTEGER)",
    "CREATE TABLE log(generation INTEGER PRIMARY KEY, kind INTEGER, removed INTEGER, key BLOB, sum INTEGER)",
    "CREATE TABLE use(node INTEGER PRIMARY KEY, hits INTEGER, used INTEGER, sum INTEGER)",
    "CREATE TABLE file(device INTEGER, inode INTEGER, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, hash BLOB, "
    "sum INTEGER, PRIMARY KEY(device, inode)) WITHOUT ROWID",
    "CREATE TABLE history(segment INTEGER PRIMARY KEY, bytes BLOB, sum INTEGER)",
    "CREATE TABLE setting(name TEXT PRIMARY KEY, value INTEGER, sum INTEGER) WITHOUT ROWID",
    NULL,
};

static const char *const sql[CAT_N_SQL] = {
    [CAT_META_GET] = "SELECT generation, log_first, next_node, segment_bytes, reserved_bytes, n_spaces, n_segments, "
                     "n_nodes, n_reservations, spaces_sum, segments_sum, nodes_sum, reservations_sum, sum FROM meta "
                     "WHERE id = 1",
    [CAT_META_PUT] = "INSERT OR REPLACE INTO meta VALUES(1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    [CAT_SPACE_GET] = "SELECT id, created, model_name, sum FROM space WHERE id = ?",
    [CAT_SPACE_PUT] = "INSERT OR REPLACE INTO space VALUES(?, ?, ?, ?)",
    [CAT_SPACE_DEL] = "DELETE FROM space WHERE id = ?",
    [CAT_SPACE_ALL] = "SELECT id, created, model_name, sum FROM space",
    [CAT_SEGMENT_GET] = "SELECT id, space, disk_bytes, n_tokens, sum FROM segment WHERE id = ?",
    [CAT_SEGMENT_PUT] = "INSERT OR REPLACE INTO segment VALUES(?, ?, ?, ?, ?)",
    [CAT_SEGMENT_DEL] = "DELETE FROM segment WHERE id = ?",
    [CAT_SEGMENT_ALL] = "SELECT id, space, disk_bytes, n_tokens, sum FROM segment",
    [CAT_NODE_GET] = "SELECT id, parent, space, segment, segment_first, n_tokens, depth, flags, created, sum, tokens "
                     "FROM node WHERE id = ?",
    [CAT_NODE_PUT] = "INSERT OR REPLACE INTO node VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    [CAT_NODE_DEL] = "DELETE FROM node WHERE id = ?",
    [CAT_NODE_DEPTHS] = "SELECT id, depth FROM node",
    [CAT_RESERVATION_GET] = "SELECT segment, instance, bytes, sum FROM reservation WHERE segment = ?",
    [CAT_RESERVATION_PUT] = "INSERT OR REPLACE INTO reservation VALUES(?, ?, ?, ?)",
    [CAT_RESERVATION_DEL] = "DELETE FROM reservation WHERE segment = ?",
    [CAT_RESERVATION_ALL] = "SELECT segment, instance, bytes, sum FROM reservation",
    [CAT_LOG_SINCE] = "SELECT generation, kind, removed, key, sum FROM log WHERE generation > ? ORDER BY generation",
    [CAT_LOG_PUT] = "INSERT INTO log VALUES(?, ?, ?, ?, ?)",
    [CAT_LOG_PRUNE] = "DELETE FROM log WHERE generation < ?",
    [CAT_USE_PUT] = "INSERT OR REPLACE INTO use VALUES(?, ?, ?, ?)",
    [CAT_USE_DEL] = "DELETE FROM use WHERE node = ?",
    [CAT_USE_ALL] = "SELECT node, hits, used, sum FROM use",
    [CAT_FILE_GET] = "SELECT device, inode, size, mtime_ns, ctime_ns, hash, sum FROM file "
                     "WHERE device = ? AND inode = ?",
    [CAT_FILE_PUT] = "INSERT OR REPLACE INTO file VALUES(?, ?, ?, ?, ?, ?, ?)",
    [CAT_FILE_ALL] = "SELECT device, inode, size, mtime_ns, ctime_ns, hash, sum FROM file",
    [CAT_HISTORY_GET] = "SELECT segment, bytes, sum FROM history WHERE segment = ?",
    [CAT_HISTORY_PUT] = "INSERT OR REPLACE INTO history SELECT ?1, ?2, ?3 "
                        "WHERE EXISTS(SELECT 1 FROM segment WHERE id = ?1)",
    [CAT_HISTORY_DEL] = "DELETE FROM history WHERE segment = ?",
    [CAT_HISTORY_ALL] = "SELECT segment, bytes, sum FROM history",
    [CAT_SETTING_GET] = "SELECT name, value, sum FROM setting WHERE name = ?",
    [CAT_SETTING_PUT] = "INSERT OR REPLACE INTO setting VALUES(?, ?, ?)",
    [CAT_SETTING_ALL] = "SELECT name, value, sum FROM setting",
};

static const size_t n_tables[] = {8, 9, 10, 10}; /* of versions 1, 2 (histories), 3 (settings) and 4 (no new one) */

const cat_schema cat_catalogue_schema = {
    .application_id = 0x494d5043, /* "IMPC" */
    .version = CAT_VERSION_SPACES_GO,
    .oldest = 1,
    .n_tables = n_tables,
    .create = create,
    .sql = sql,
    .n_sql = CAT_N_SQL,
};
