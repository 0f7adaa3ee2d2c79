/* Texts whose words take a tokeniser more stack than a thread has. */
#include "chat_fixture.h"

#include <errno.h>
#include <pthread.h>

#include "model.h"
#include "tokenize.h"

static void check_stretch(const char *text, size_t n)
{
    size_t got = app_tokenize_stretch(text, strlen(text));
    if (got != n) fail_msg("%s: %zu", text, got);
}

static void test_stretches(void **unused)
{
    (void)unused;
    check_stretch("", 0);
    check_stretch("abc", 3);
    check_stretch("ab\ncde\nf", 4);
    check_stretch("a b\r\nc", 5);
    /* white space after a line's end belongs to both lines */
    check_stretch("a\n \n\t\nbc", 6);
    check_stretch("a\n\xe3\x80\x80\n\xe3\x80\x80\nb", 6);
    check_stretch("=\n/\n/\na", 6);
    check_stretch("\xc3\xa9\xc3\xa9", 2);
}

typedef struct job {
    const struct llama_vocab *vocab;
    char *text;
    size_t n;
} job;

/* A byte is a token here. */
static void *tokenize(void *arg)
{
    job *j = arg;
    llama_token *tokens = NULL;
    size_t n = 0;
    app_prompt prompt = {0};
    bool ok = app_tokenize_more(j->vocab, j->text, j->n, false, true, &tokens, &n);
    ok = app_prompt_append(j->vocab, &prompt, j->text, j->n, false, true) && ok;
    j->n = ok && n == prompt.n && memcmp(tokens, prompt.tokens, n * sizeof *tokens) == 0 ? n : 0;
    free(tokens);
    app_prompt_free(&prompt);
    return NULL;
}

/* On a connection's stack, and several at once: the large ones wait for each other. */
static void test_long_words(void **unused)
{
    (void)unused;
    enum { N_THREADS = 4, N_BYTES_EACH = 100000 };
    static const char fills[N_THREADS] = {'a', '=', ' ', 'A'};
    struct llama_model *m = make_model_cut(NULL, false, "gpt-4o");
    pthread_t threads[N_THREADS];
    job jobs[N_THREADS];
    pthread_attr_t attr;
    assert_int_equal(pthread_attr_init(&attr), 0);
    assert_int_equal(pthread_attr_setstacksize(&attr, 8 << 20), 0);
    for (size_t i = 0; i < N_THREADS; i++) {
        jobs[i] = (job){llama_model_get_vocab(m), malloc(N_BYTES_EACH), N_BYTES_EACH};
        assert_non_null(jobs[i].text);
        memset(jobs[i].text, fills[i], N_BYTES_EACH);
        assert_int_equal(pthread_create(&threads[i], &attr, tokenize, &jobs[i]), 0);
    }
    for (size_t i = 0; i < N_THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(jobs[i].n, N_BYTES_EACH);
        free(jobs[i].text);
    }
    pthread_attr_destroy(&attr);
    llama_model_free(m);
}

static void test_too_long(void **unused)
{
    (void)unused;
    struct llama_model *m = make_model(plain_template, false);
    chat_template *t = NULL;
    oai_error e = {0};
    assert_int_equal(chat_template_open(m, NULL, &t, &e), 0);
    const size_t n = APP_TOKENIZE_CHARACTERS + 1;
    char *text = malloc(n + 1), *body = malloc(n + 128);
    assert_true(text && body);
    memset(text, 'a', n);
    text[n] = '\0';
    for (int chat = 0; chat < 2; chat++) {
        static const char *const bodies[] = {"{\"prompt\":\"%s\"}",
                                             "{\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}]}"};
        snprintf(body, n + 128, bodies[chat], text);
        refuse_plan(t, chat, body, "without a line break");
    }
    const struct llama_vocab *vocab = llama_model_get_vocab(m);
    llama_token *tokens = NULL;
    size_t n_tokens = 0;
    assert_false(app_tokenize_more(vocab, text, n, false, true, &tokens, &n_tokens));
    assert_int_equal(errno, EMSGSIZE);
    text[n / 2] = '\n';
    assert_true(app_tokenize_more(vocab, text, n, false, true, &tokens, &n_tokens));
    assert_int_equal(n_tokens, n);
    free(tokens);
    free(text);
    free(body);
    chat_template_close(t);
    llama_model_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stretches),
        cmocka_unit_test(test_long_words),
        cmocka_unit_test(test_too_long),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
