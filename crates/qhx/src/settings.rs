//! How an answer is made: the same settings for conversations and completions.

/// Gives a type with a field `options: GenerateOptions` its settings.
macro_rules! generation_settings {
    () => {
        /// The most tokens to generate.
        pub fn max_tokens(mut self, tokens: usize) -> Self {
            self.options.max_new = tokens;
            self
        }

        /// How random the choice of tokens is: 0, the default, takes the most probable one.
        pub fn temperature(mut self, temperature: f32) -> Self {
            self.options.sampler.temperature = temperature;
            self
        }

        /// Samples from so many of the most probable tokens.
        pub fn top_k(mut self, tokens: usize) -> Self {
            self.options.sampler.top_k = tokens;
            self
        }

        /// Samples from the most probable tokens that together reach this probability.
        pub fn top_p(mut self, probability: f32) -> Self {
            self.options.sampler.top_p = probability;
            self
        }

        /// Where random numbers start: the same seed gives the same text.
        pub fn seed(mut self, seed: u64) -> Self {
            self.options.sampler.seed = seed;
            self
        }

        /// A text that ends the answer and is not part of it; may be given several times.
        pub fn stop(mut self, text: impl Into<String>) -> Self {
            self.options.stop.push(text.into());
            self
        }

        /// Answers with JSON that follows this schema, whatever the model would say otherwise.
        pub fn json_schema(mut self, schema: ::serde_json::Value) -> Self {
            self.options.structure.constraint = Some(::qhx_runtime::Constraint::JsonSchema(schema));
            self
        }

        /// All settings at once.
        pub fn options(mut self, options: ::qhx_runtime::GenerateOptions) -> Self {
            self.options = options;
            self
        }

        /// Lets another thread stop answers. An answer that was stopped ends with [`FinishReason::Cancelled`](crate::FinishReason).
        pub fn cancel(mut self, cancel: ::qhx_runtime::Cancel) -> Self {
            self.cancel = cancel;
            self
        }
    };
}

pub(crate) use generation_settings;
