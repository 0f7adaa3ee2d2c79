/* Calls that could leave the adapter's books and llama.cpp's cells apart, or store what isn't exact. */
#include "llama_fixture.h"

static int checks_left = -1;

static bool abort_now(void *user)
{
    (void)user;
    return checks_left >= 0 && checks_left-- == 0;
}

/* However far an aborted decode came, the batch left no trace and can be decoded again. */
static void test_abort_leaves_no_trace(void **state)
{
    (void)state;
    prompt p = make_prompt(N_PREFIX, question_a);
    struct llama_context_params cp = context_params();
    cp.n_ubatch = 32;
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, cp);
    llama_set_abort_callback(imp_llama_context(ctx), abort_now, NULL);
    int aborted = 0, step = 1;
    for (int checks = 0;; checks += step, step *= 2) {
        checks_left = checks;
        int32_t rc = feed(ctx, &p, 0, 0, p.n, 512);
        checks_left = -1;
        if (rc == 0) break;
        aborted++;
        assert_int_equal(imp_llama_seq_pos_max(ctx, 0), -1);
        assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(imp_llama_context(ctx)), 0), -1);
    }
    assert_true(aborted > 3);
    assert_int_equal(imp_llama_seq_pos_max(ctx, 0), p.n - 1);
    imp_llama_free(ctx);
    imp_store_close(store);
}

/* What is dropped by keeping one sequence is gone from llama.cpp's cells too, in other streams as well. */
static void test_keep_with_streams(void **state)
{
    (void)state;
    prompt p = make_prompt(N_PREFIX, question_a);
    struct llama_context_params cp = context_params();
    cp.kv_unified = false;
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, cp);
    for (llama_seq_id seq = 0; seq < 2; seq++) assert_int_equal(feed(ctx, &p, seq, 0, p.n, 512), 0);
    imp_llama_seq_keep(ctx, 0);
    assert_int_equal(imp_llama_seq_pos_max(ctx, 0), p.n - 1);
    assert_int_equal(imp_llama_seq_pos_max(ctx, 1), -1);
    assert_int_equal(llama_memory_seq_pos_max(llama_get_memory(imp_llama_context(ctx)), 1), -1);
    assert_int_equal(feed(ctx, &p, 1, 0, p.n, 512), 0);
    imp_llama_free(ctx);
    imp_store_close(store);
}

/* Shifting a copy shifts the cells it shares with its source: nothing of either is stored from then on. */
static void test_shift_of_a_copy(void **state)
{
    (void)state;
    prompt p = make_prompt(300, question_a);
    struct llama_context_params cp = context_params();
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, cp);
    assert_int_equal(feed(ctx, &p, 0, 0, 150, 512), 0);
    imp_llama_seq_cp(ctx, 0, 1, -1, -1);
    imp_llama_seq_add(ctx, 1, 0, 150, -150);
    assert_int_equal(imp_llama_flush(ctx), 0);
    imp_store_flush(store);
    imp_stats before, after;
    assert_int_equal(imp_store_stats(store, &before), 0);

    /* The source goes on, far enough to be stored if it were taken for exact. */
    llama_pos at = imp_llama_seq_pos_max(ctx, 0) + 1;
    assert_int_equal(at, llama_memory_seq_pos_max(llama_get_memory(imp_llama_context(ctx)), 0) + 1);
    struct llama_batch b = llama_batch_init(512, 0, 1);
    for (int i = 0; i < 150; i++) put(&b, p.tokens[150 + i], at + i, 0, i == 149);
    assert_int_equal(imp_llama_decode(ctx, b), 0);
    llama_batch_free(b);
    assert_int_equal(imp_llama_flush(ctx), 0);
    imp_store_flush(store);
    assert_int_equal(imp_store_stats(store, &after), 0);
    assert_int_equal(after.n_tokens, before.n_tokens);
    imp_llama_free(ctx);
    imp_store_close(store);
}

/* One sequence is flushed while another's prompt is half computed: that one's rest is stored with it later, in one. */
static void test_flush_of_one(void **state)
{
    (void)state;
    prompt p = make_prompt(300, question_a);
    struct llama_context_params cp = context_params();
    imp_store *store = open_store();
    imp_llama *ctx = open_llama(store, cp);
    imp_stats s;
    assert_int_equal(feed(ctx, &p, 0, 0, 150, 512), 0);
    assert_int_equal(imp_llama_set_salt(ctx, 1, "another"), 0);
    assert_int_equal(feed(ctx, &p, 1, 0, 200, 512), 0);
    assert_int_equal(imp_llama_flush_seq(ctx, 1), 0);
    assert_int_equal(imp_store_flush(store), 0);
    assert_int_equal(imp_store_stats(store, &s), 0);
    assert_int_equal(s.n_tokens, 200);

    assert_int_equal(feed(ctx, &p, 0, 150, 180, 512), 0); /* 30 more are too few for a node of their own */
    assert_int_equal(imp_llama_flush_seq(ctx, 0), 0);
    assert_int_equal(imp_store_flush(store), 0);
    assert_int_equal(imp_store_stats(store, &s), 0);
    assert_int_equal(s.n_tokens, 200 + 180);

    assert_int_equal(imp_llama_flush_seq(ctx, -1), IMP_E_ARG);
    assert_int_equal(imp_llama_flush_seq(ctx, (llama_seq_id)cp.n_seq_max), IMP_E_ARG);
    imp_llama_free(ctx);
    imp_store_close(store);
}

/* The model's file is replaced while the model is in use: what is stored from then on is the old one's still. */
static void test_model_file_replaced(void **state)
{
    (void)state;
    char copy[300], command[1024], before[33], after[33];
    snprintf(copy, sizeof copy, "%s.gguf", store_dir);
    snprintf(command, sizeof command, "cp '%s' '%s'", model_path, copy);
    assert_int_equal(system(command), 0);
    imp_store *store = open_store();
    const char *path = model_path;
    model_path = copy;
    imp_llama *ctx = open_llama(store, context_params());
    model_path = path;
    imp_space *space;
    assert_int_equal(imp_llama_open_space(ctx, "x", &space), 0);
    imp_space_id(space, before);
    imp_space_close(space);

    FILE *f = fopen(copy, "w");
    assert_true(f && fputs("another model", f) >= 0);
    fclose(f);
    assert_int_equal(imp_llama_open_space(ctx, "x", &space), 0);
    imp_space_id(space, after);
    imp_space_close(space);
    assert_string_equal(after, before);
    unlink(copy);
    assert_int_equal(imp_llama_open_space(ctx, "x", &space), 0);
    imp_space_close(space);
    imp_llama_free(ctx);
    imp_store_close(store);
}

int main(void)
{
    need_model();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_abort_leaves_no_trace, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_keep_with_streams, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_shift_of_a_copy, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_flush_of_one, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(test_model_file_replaced, make_dir, drop_dir),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    llama_model_free(model);
    return failed;
}
