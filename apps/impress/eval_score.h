/* eval_score.h: a multiple-choice question as tokens, and the log-likelihoods of its choices.
 *
 * The prompt is prefix, blank line, query; a choice is scored as the continuation " " + its text. Prompt and
 * continuation are cut apart where the tokens with a choice begin to differ from those of the prompt alone, at the
 * first such place over all choices: a token that spans the seam counts for the choice. */
#ifndef APP_EVAL_SCORE_H
#define APP_EVAL_SCORE_H

#include <stdint.h>

#include "answer.h"
#include "model.h"
#include "tasks.h"

typedef struct eval_choice {
    llama_token *tokens; /* [n], n > 0 */
    size_t n;
    double characters;   /* of its text */
} eval_choice;

typedef struct eval_question {
    const task_example *example;
    app_prompt context;   /* all before the choices; n_prefix: tokens it shares with the bare prefix */
    eval_choice *choices; /* [example->n_choices] */
    size_t longest;       /* tokens of the longest choice */
    uint64_t hash;        /* of all these tokens, and which choice is right */
} eval_question;

/* `prefix` may be "": the query stands alone. Returns 0 or an exit code after one line. */
int eval_question_make(const struct llama_model *model, const char *prefix, const task_example *example,
                       eval_question *out);
void eval_question_free(eval_question *q);

/* Decode the question's tokens [from, end) on sequence 0, with logits for the last. Returns 0 or an exit code. */
int eval_read_question(imp_llama *ctx, const eval_question *q, size_t from);

/* The log-likelihood of each choice, [n_choices], after eval_read_question(). All choices are computed over the same
 * cells of the prompt, and sequence 0 then ends after the question again. Returns 0 or an exit code. */
int eval_score_choices(imp_llama *ctx, const eval_question *q, double *logprobs);

#endif
