//! A writer of HTML in which text from outside cannot become markup: markup is a constant of the source, and all other
//! text is escaped.

use linkwise_host::picture::{self, Picture, harmless};

#[derive(Default)]
pub(super) struct Html(String);

impl Html {
    /// Adds constant markup.
    pub fn raw(&mut self, markup: &'static str) -> &mut Self {
        self.0.push_str(markup);
        self
    }

    /// Adds any text, as content or inside a quoted attribute. Control characters, and those that change the direction
    /// of writing, are replaced.
    pub fn text(&mut self, text: &str) -> &mut Self {
        for letter in text.chars().map(harmless) {
            match letter {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                '\'' => self.0.push_str("&#39;"),
                letter => self.0.push(letter),
            }
        }
        self
    }

    /// Adds a number.
    pub fn number(&mut self, number: impl Into<u64>) -> &mut Self {
        self.text(&number.into().to_string())
    }

    /// Adds the picture, under this name for assistive technology. The picture's own writer escapes.
    pub fn picture(&mut self, picture: &Picture, name: &str) -> &mut Self {
        self.0.push_str(&picture::element(picture, name));
        self
    }

    /// Writes the items one after the other.
    pub fn each<T>(&mut self, items: impl IntoIterator<Item = T>, mut write: impl FnMut(&mut Self, T)) -> &mut Self {
        items.into_iter().for_each(|item| write(self, item));
        self
    }

    /// The written HTML.
    pub fn into_string(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_never_becomes_markup() {
        let mut html = Html::default();
        html.raw("<b title=\"").text("\" onload='x' &amp;").raw("\">").text("</b><script>\u{202e}\u{0}").raw("</b>");
        assert_eq!(
            html.into_string(),
            "<b title=\"&quot; onload=&#39;x&#39; &amp;amp;\">&lt;/b&gt;&lt;script&gt;\u{fffd}\u{fffd}</b>"
        );
    }
}
