/** Every string of the interface, in English and Chinese. */

export const strings = {
  // The frame
  skip: { en: "Skip to the content", zh: "跳到正文" },
  views: { en: "Views", zh: "视图" },
  language: { en: "Language", zh: "语言" },
  theme: { en: "Colours", zh: "配色" },
  theme_auto: { en: "As the system", zh: "跟随系统" },
  theme_light: { en: "Light", zh: "浅色" },
  theme_dark: { en: "Dark", zh: "深色" },
  copyLink: { en: "Copy link", zh: "复制链接" },
  copied: { en: "Copied", zh: "已复制" },
  copy: { en: "Copy", zh: "复制" },
  linkHere: { en: "Link to this view", zh: "此视图的链接" },
  madeBy: {
    en: "Made by polyhead {version}. This file holds everything; it asks nothing of the network.",
    zh: "由 polyhead {version} 生成。此文件自含全部内容，不访问网络。",
  },
  factHeads: { en: "{heads} heads in {layers} layers", zh: "{layers} 层共 {heads} 个头" },
  factTokens: { en: "{tokens} tokens of {documents} documents", zh: "{documents} 篇文档的 {tokens} 个词元" },
  factContext: { en: "read at most {context} tokens at a time", zh: "每次最多读 {context} 个词元" },
  interrupted: {
    en: "the run was interrupted: numbers are of what was read until then",
    zh: "运行被中断：数字只涵盖此前读到的内容",
  },
  overview: { en: "Overview", zh: "总览" },
  alike: { en: "Heads alike", zh: "相似的头" },
  matters: { en: "What matters", zh: "哪些头重要" },
  syntax: { en: "Grammar", zh: "语法" },
  findings: { en: "Findings", zh: "发现" },
  saveSvg: { en: "Save “{title}” as SVG", zh: "将“{title}”存为 SVG" },
  savePng: { en: "Save “{title}” as PNG", zh: "将“{title}”存为 PNG" },
  showAll: { en: "Show all {count}", zh: "显示全部 {count} 行" },
  asTable: { en: "As a table", zh: "以表格显示" },

  // Places and numbers
  place: { en: "Layer {layer}, head {head}", zh: "第 {layer} 层第 {head} 头" },
  placeIn: { en: "{place} ({stack})", zh: "{place}（{stack}）" },
  placeFrom: { en: "{place}, {origin}", zh: "{place}，{origin}" },
  edited: { en: "Edited: {edits}", zh: "经过编辑：{edits}" },
  layerName: { en: "Layer {layer}", zh: "第 {layer} 层" },
  headName: { en: "Head {head}", zh: "第 {head} 头" },
  head: { en: "Head", zh: "头" },
  role: { en: "Role", zh: "角色" },
  roles: { en: "Roles", zh: "角色" },
  noRole: { en: "no role", zh: "无角色" },
  inNats: { en: "{number} nats", zh: "{number} 奈特" },
  inTokens: { en: "{number} tokens", zh: "{number} 个词元" },
  group_looks: { en: "Where it looks", zh: "看向哪里" },
  group_writes: { en: "What it writes", zh: "写入什么" },
  group_matters: { en: "Whether it matters", zh: "是否重要" },
  group_other: { en: "Other", zh: "其他" },

  // The answers at the top of the overview
  atAGlance: { en: "At a glance", zh: "一目了然" },
  glanceNames: {
    en: "A head is called by its layer and its number there: 2.7 is head 7 of layer 2. Both count from 0.",
    zh: "头以所在层和层内编号命名：2.7 即第 2 层第 7 头。两者都从 0 数起。",
  },
  glancePrevious: { en: "Which heads look at the previous token?", zh: "哪些头看向前一个词元？" },
  glanceNoPrevious: { en: "None does so reliably.", zh: "没有头稳定地这样做。" },
  glanceAlike: { en: "Which two are most alike?", zh: "哪两个头最相似？" },
  glanceSame: { en: "cosine {value}: they say the same", zh: "余弦 {value}：说的是同一件事" },
  glanceNotSame: {
    en: "cosine {value}: alike, but not the same (from {threshold} on)",
    zh: "余弦 {value}：相似，但不相同（{threshold} 起才算）",
  },
  glanceCosine: { en: "cosine {value}", zh: "余弦 {value}" },
  glanceNoPairs: { en: "Not measured in this run.", zh: "此次运行没有衡量。" },
  glanceMatters: { en: "Which matter most?", zh: "哪些头最重要？" },
  glanceFirst: { en: "the first {evidence}", zh: "第一个{evidence}" },
  glanceMost: { en: "the first: {column} {value}", zh: "第一个：{column} {value}" },
  glanceAll: { en: "more", zh: "更多" },

  // Overview
  whatWasFound: { en: "What was found", zh: "发现了什么" },
  allFindings: { en: "All {count} findings", zh: "全部 {count} 条发现" },
  seeEvidence: { en: " (see the evidence)", zh: "（查看证据）" },
  everyHead: { en: "Every head", zh: "每一个头" },
  everyHeadAbout: {
    en:
      "A model reads a text layer by layer. In each layer several heads decide, for every token, which " +
      "other tokens to look at. Each square is one head; open it to see what it does.",
    zh: "模型逐层阅读文本。每一层有若干个头，为每个词元决定要看哪些别的词元。每个方格是一个头，打开即可看到它做什么。",
  },
  colourBy: { en: "Colour by", zh: "着色依据" },
  byRole: { en: "Role", zh: "角色" },
  byRoleAbout: {
    en:
      "A role says in a word what a head does; the letters in a square stand for its most telling one. " +
      "A head without letters has none that could be shown.",
    zh: "角色用一个词说明一个头做什么；方格中的字母代表其最能说明问题的角色。没有字母的头没有可证实的角色。",
  },
  byMap: { en: "Picture of its attention", zh: "注意力图" },
  byMapAbout: {
    en:
      "Each square is a map of where the head looks: rows are the tokens that look, from the top of " +
      "the text to its end, columns the tokens looked at. A diagonal is a head that looks nearby, a " +
      "stripe down the left edge one that rests on the first token.",
    zh: "每个方格是该头注视位置的地图：行是发出注视的词元，从文首到文末；列是被注视的词元。对角线表示看近处，左边缘的竖条表示停在首个词元上。",
  },
  onlyRole: { en: "Only heads with the role", zh: "只看具有此角色的头" },
  anyRole: { en: "any or none", zh: "不限" },
  shownHeads: { en: "{shown} of {all} heads", zh: "{all} 个头中的 {shown} 个" },
  gridTitle: { en: "Layers by heads", zh: "层 × 头" },
  gridCorner: { en: "layer", zh: "层" },
  gridName: {
    en: "{stack}, coloured by: {coloured}. Arrow keys walk, Enter opens a head.",
    zh: "{stack}，着色依据：{coloured}。方向键移动，回车打开。",
  },
  peekHint: {
    en: "Point at a square to glance at a head; click it, or press Enter, for everything about it.",
    zh: "指向方格可略看一个头；点击或按回车可查看其全部内容。",
  },
  headsTable: { en: "Heads as a table", zh: "所有头的表格" },
  whichNumbers: { en: "Which numbers", zh: "显示哪些数字" },

  // A head's card
  noSuchHead: { en: "This model has no such head", zh: "此模型没有这个头" },
  toOverview: { en: "To all heads", zh: "回到所有头" },
  neighbours: { en: "Neighbouring heads", zh: "相邻的头" },
  previousHead: { en: "previous head", zh: "上一个头" },
  nextHead: { en: "next head", zh: "下一个头" },
  allHeads: { en: "All heads", zh: "所有头" },
  noRoleHere: {
    en: "None of the roles that were looked for could be shown for this head.",
    zh: "所考察的角色中，没有一个能在此头上得到证实。",
  },
  examples: { en: "On real sentences", zh: "在真实的句子上" },
  examplesAbout: {
    en:
      "Choose a word, by pointer or keyboard. Shaded words are those it looks at, the stronger the " +
      "shade the more; a bar under a word means that it looks at the chosen one. With none chosen, the " +
      "shade is what each word receives on average.",
    zh: "用指针或键盘选择一个词。着色的词是它所看的词，对比越强看得越多；词下的横条表示该词在看所选的词。未选择时，颜色表示每个词平均得到的注意力。",
  },
  examplesAboutTwo: {
    en:
      "Words of one text look at words of another. Choose one of the upper words to see what it looks " +
      "at, or one of the lower to see who looks at it.",
    zh: "一段文本的词看向另一段文本的词。选择上方的词可看到它看向哪里，选择下方的词可看到谁在看它。",
  },
  theseLook: { en: "These look", zh: "这些词在看" },
  theseAreLookedAt: { en: "These are looked at", zh: "这些词被看" },
  lookedAtOnAverage: { en: "Looked at most, on average", zh: "平均最受注视" },
  wordLooksAt: { en: "“{word}” looks at", zh: "“{word}”看向" },
  wordSeenBy: { en: "“{word}” is looked at by", zh: "看向“{word}”的有" },
  nobody: { en: "none above 0.5%", zh: "没有超过 0.5% 的" },
  drawAs: { en: "Draw as", zh: "绘制方式" },
  asWords: { en: "Words", zh: "词" },
  asLines: { en: "Words and lines", zh: "词与连线" },
  whichExample: { en: "Which text", zh: "选择文本" },
  exampleNumber: { en: "Text {number}", zh: "文本 {number}" },
  blockMap: { en: "Where it looks, by place", zh: "按位置看向哪里" },
  blockMapAbout: {
    en:
      "The average over all texts. A row is where in the text the looking tokens stand, a column where " +
      "those stand that they look at. Colour grows with the square root, so that small shares are seen " +
      "too.",
    zh: "所有文本的平均。行是发出注视的词元在文中的位置，列是被注视的词元的位置。颜色按平方根变化，使较小的份额也能看见。",
  },
  mapAcross: { en: "tokens looked at", zh: "被注视的词元" },
  mapDown: { en: "tokens that look", zh: "发出注视的词元" },
  mapCell: { en: "From {query} to {key}: {share}", zh: "从{query}到{key}：{share}" },
  mapHint: { en: "Point at the map to read it.", zh: "指向地图可读取数值。" },
  tokensFromTo: { en: "tokens {from}–{to}", zh: "第 {from}–{to} 个词元" },
  mapDescribed: {
    en:
      "Map of attention with {rows} by {columns} cells. {diagonal} of the attention lies on the " +
      "diagonal, {first} on the first tokens. It is strongest from block {row} to block {column}.",
    zh: "注意力地图，{rows} × {columns} 格。{diagonal} 的注意力在对角线上，{first} 在最前面的词元上。最强处是从第 {row} 块到第 {column} 块。",
  },
  offsetProfile: { en: "Where it looks, by distance", zh: "按距离看向哪里" },
  offsetAbout: {
    en:
      "The share of its attention that goes to tokens so many places before (−) or after (+) the one " +
      "that looks. 0 is the token itself. Far distances are taken together.",
    zh: "注意力中有多少份额落在之前（−）或之后（+）相隔若干位置的词元上。0 为词元自身。较远的距离合并显示。",
  },
  offsetAxis: { en: "tokens before (−) or after (+)", zh: "之前（−）或之后（+）的词元数" },
  shareOfAttention: { en: "share of attention", zh: "注意力份额" },
  offsetDescribed: {
    en: "Bars of attention by distance. The largest: {most}.",
    zh: "按距离的注意力柱状图。最大的：{most}。",
  },
  roleScores: { en: "How far it has each role", zh: "各角色的程度" },
  roleScoresAbout: {
    en: "With its interval of 95% over the {over} that were read, and what chance would show.",
    zh: "附其在所读{over}上的 95% 区间，以及随机水平。",
  },
  over_documents: { en: "documents", zh: "文档" },
  over_contexts: { en: "pieces of text", zh: "文本片段" },
  keyHolds: { en: "has the role", zh: "具有该角色" },
  keyHoldsNot: { en: "has it not", zh: "不具有" },
  keyInterval: { en: "interval", zh: "区间" },
  keyChance: { en: "chance", zh: "随机水平" },
  roleScoresDescribed: {
    en:
      "Scores of every role with interval and chance; the head has: {roles}. All numbers are in the " + "table below.",
    zh: "每个角色的得分、区间与随机水平；此头具有：{roles}。全部数字见下方表格。",
  },
  score: { en: "Score", zh: "得分" },
  interval: { en: "Interval (95%)", zh: "区间（95%）" },
  chance: { en: "Chance", zh: "随机水平" },
  evidence: { en: "Evidence", zh: "证据" },
  lookAlikes: { en: "Most alike", zh: "最相似的头" },
  lookAlikesAbout: {
    en: "Heads that write most nearly the same (cosine; 1 is the same).",
    zh: "写入内容最接近的头（余弦；1 为相同）。",
  },
  likenessShort: {
    en: "From {threshold} on they count as the same; random weights reach {chance}.",
    zh: "达到 {threshold} 即视为相同；随机权重可达 {chance}。",
  },
  sameLayer: { en: "same layer", zh: "同一层" },
  otherLayer: { en: "other layer", zh: "其他层" },
  topKeys: { en: "Looks most at", zh: "最常看向" },
  topKeysAbout: {
    en: "Tokens that get the most of its attention, over the whole text.",
    zh: "在整个文本中得到其最多注意力的词元。",
  },
  numbers: { en: "Its numbers, among all heads", zh: "它的数字，与所有头相比" },
  numbersAbout: {
    en:
      "Each tick is a head of this model, the dot is this one, the longer tick what chance would show, where that " +
      "is known. ± is the standard error. Open a name to read what it means.",
    zh: "每条短线是此模型的一个头，圆点是本头，较长的线是随机水平（若已知）。± 为标准误。展开名称可查看其含义。",
  },
  number: { en: "Number", zh: "指标" },
  value: { en: "Value", zh: "值" },
  rank: { en: "Rank", zh: "排名" },
  rankOf: { en: "{rank} of {all}", zh: "第 {rank} / {all}" },
  amongAll: { en: "Among all heads", zh: "在所有头中" },
  spread: {
    en: "It varies from token to token with a standard deviation of {spread}.",
    zh: "在词元之间变动，标准差为 {spread}。",
  },
  stripDescribed: {
    en: "All heads lie between {low} and {high}; this one is number {rank} of {all} from the top.",
    zh: "所有头介于 {low} 与 {high} 之间；此头从高到低排第 {rank}，共 {all} 个。",
  },

  // Heads alike
  alikeAbout: {
    en:
      "Two heads that write nearly the same could be one. Below: groups that do, every two heads of a " +
      "layer, and pairs across layers.",
    zh: "写入内容几乎相同的两个头可以合为一个。下面是这样的组、同层中的每两个头，以及跨层的配对。",
  },
  mostAlikeOfAll: {
    en: "The two that are most alike: {one} and {other}, with a cosine of {value}.",
    zh: "最相似的两个头：{one}与{other}，余弦为 {value}。",
  },
  groups: { en: "Groups that say the same", zh: "写入相同内容的组" },
  noGroups: { en: "No two heads of a layer are so alike.", zh: "没有同层的两个头如此相似。" },
  noLikeness: {
    en: "Random weights were not watched in this run, so there is no threshold and there are no groups.",
    zh: "此次运行没有观察随机权重，因此没有阈值，也没有分组。",
  },
  likenessAbout: {
    en:
      "Heads of one layer form a group when what they write agrees with a cosine of at least " +
      "{threshold}. The same model with random weights reaches {chance}, so that less would say " +
      "nothing.",
    zh: "同层的头若写入内容的余弦不低于 {threshold}，即归为一组。同一模型换成随机权重可达 {chance}，因此更低的值说明不了什么。",
  },
  leastAlike: { en: "(the least alike two: {cosine})", zh: "（最不相似的两个：{cosine}）" },
  editPrune: {
    en: "Keep {head} of them; the heads that stay make up for the others on a text of yours:",
    zh: "只保留其中的 {head}，留下的头按您的文本补上其余的头：",
  },
  editMerge: { en: "Or make them one head:", zh: "或者把它们合成一个头：" },
  editShare: {
    en: "Take out {share} of all heads, those that the others can best make up for on a text of yours:",
    zh: "去掉全部头的 {share}，即其余的头在您的文本上最能补上的那些：",
  },
  copyCommand: { en: "Copy the command", zh: "复制命令" },
  likenessTitle: { en: "How alike heads of a layer are", zh: "同层的头有多相似" },
  likenessNote: {
    en: "Every two heads of a layer by the cosine of what they write.",
    zh: "同层每两个头写入内容的余弦。",
  },
  likenessDescribed: {
    en: "Histogram of the cosines of {pairs} pairs of heads; {above} are above the threshold.",
    zh: "{pairs} 对头的余弦直方图；其中 {above} 对高于阈值。",
  },
  pairsOfHeads: { en: "pairs of heads", zh: "头的对数" },
  threshold: { en: "threshold", zh: "阈值" },
  cosine: { en: "cosine", zh: "余弦" },
  withinLayers: { en: "Every two heads of a layer", zh: "同层的每两个头" },
  relation: { en: "Measured by", zh: "衡量方式" },
  matrixHint: {
    en: "Point at a matrix to read it; its rows and columns are the heads of the layer.",
    zh: "指向矩阵可读取数值；行与列都是该层的头。",
  },
  pairReadout: { en: "{one} and {other}: {value}", zh: "{one} 与 {other}：{value}" },
  matrixDescribed: {
    en: "{layer}: most alike are heads {one} and {other}, {value}.",
    zh: "{layer}：最相似的是第 {one} 与第 {other} 头，{value}。",
  },
  mostAlike: { en: "The most alike: {relation}", zh: "最相似的：{relation}" },
  oneHead: { en: "One head", zh: "一个头" },
  otherHead: { en: "The other", zh: "另一个头" },
  acrossLayers: { en: "Across layers", zh: "跨层" },
  acrossAbout: { en: "Heads of different layers whose contributions agree most.", zh: "不同层中贡献最一致的头。" },
  noPairs: { en: "No pairs across layers were measured in this run.", zh: "此次运行没有衡量跨层的配对。" },

  // What matters
  noImportance: { en: "Importance was not measured in this run.", zh: "此次运行没有衡量重要性。" },
  mattersMost: { en: "{head} matters most.", zh: "{head}最重要。" },
  ranking: { en: "The {count} heads that matter most", zh: "最重要的 {count} 个头" },
  rankingAbout: {
    en: "The line on a bar spans 1.96 standard errors to either side.",
    zh: "柱上的线段表示两侧各 1.96 个标准误。",
  },
  rankingDescribed: {
    en: "Bars of importance. {head} matters most: {value}. All numbers are in the table below.",
    zh: "重要性柱状图。{head}最重要：{value}。全部数字见下方表格。",
  },
  standardError: { en: "standard error", zh: "标准误" },

  // Grammar
  noSyntax: { en: "No treebank was read in this run.", zh: "此次运行没有读取树库。" },
  syntaxAbout: {
    en:
      "For each grammatical relation, the head that most often looks from a word to its partner. The " +
      "baseline is the best fixed distance, such as “the word before”; it knows no grammar, so only " +
      "what lies above it counts.",
    zh: "对每种语法关系，列出最常从一个词看向其搭档的头。基线是最佳的固定距离，例如“前一个词”；它不懂语法，因此只有高出基线的部分才有意义。",
  },
  syntaxTable: { en: "Relations and the heads that know them", zh: "语法关系与掌握它们的头" },
  treebank: { en: "Treebank", zh: "树库" },
  syntaxRelation: { en: "Relation", zh: "关系" },
  direction: { en: "Looks", zh: "看向" },
  toHead: { en: "to the governing word", zh: "支配词" },
  toDependent: { en: "to the dependent word", zh: "从属词" },
  bestHead: { en: "Best head", zh: "最佳的头" },
  accuracy: { en: "Accuracy (95%)", zh: "准确率（95%）" },
  baseline: { en: "Baseline", zh: "基线" },
  gain: { en: "Above the baseline", zh: "高出基线" },
  gainDescribed: { en: "accuracy {accuracy}, baseline {baseline}", zh: "准确率 {accuracy}，基线 {baseline}" },
  verdict: { en: "Than the baseline", zh: "与基线相比" },
  verdict_better: { en: "better", zh: "更好" },
  verdict_worse: { en: "worse", zh: "更差" },
  verdict_none: { en: "cannot be told apart", zh: "无法区分" },
  bestOffset: { en: "Baseline's distance", zh: "基线的距离" },
  wordsSeen: { en: "Words", zh: "词数" },

  // Findings and the run
  noFindings: { en: "Nothing stood out.", zh: "没有突出的发现。" },
  aboutRun: { en: "How this was made", zh: "这是如何得到的" },
  modelOf: { en: "{model} ({kind})", zh: "{model}（{kind}）" },
  aboutModel: { en: "Model", zh: "模型" },
  aboutEdits: { en: "Edits, by original heads", zh: "编辑（按原编号）" },
  aboutText: { en: "Text", zh: "文本" },
  aboutContexts: { en: "Read as", zh: "读取方式" },
  contextsOf: { en: "{contexts} pieces of at most {context} tokens", zh: "{contexts} 段，每段最多 {context} 个词元" },
  aboutIntervals: { en: "Intervals are over", zh: "区间基于" },
  aboutUnknown: { en: "Tokens unknown to the vocabulary", zh: "词表之外的词元" },
  aboutLoss: { en: "Importance by", zh: "重要性依据" },
  aboutPairs: { en: "Pairs across layers", zh: "跨层配对" },
  aboutTime: { en: "Time taken", zh: "用时" },
  seconds: { en: "{seconds} seconds", zh: "{seconds} 秒" },
  aboutVersions: { en: "Versions", zh: "版本" },
  leftOut: { en: "Left out, and why", zh: "未包含的内容及原因" },
} as const;
